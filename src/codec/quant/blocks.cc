#include "codec/quant/blocks.h"

#include <cmath>

#include "codec/quant/block_scaler.h"
#include "codec/quant/box_rows.h"
#include "codec/quant/matrix.h"
#include "codec/simd/kernel_set.h"

namespace tessera::codec {
namespace {

class AmaxGatherer {
 public:
  AmaxGatherer(const BlockFormat& format, const SourceBox& box, NonfiniteElements& found)
      : format_(format),
        box_(box),
        found_(found),
        reader_(box),
        kernels_(*active_kernels().amax),
        type_(index_of(quantized_input(box.dtype))),
        bytes_(static_cast<size_t>(bytes_of(quantized_input(box.dtype), 1))) {}

  // Adds columns [column, column + n) of rows in one block row; `amaxes` begins with the first column's block.
  void add(int64_t row, int64_t rows, int64_t column, int64_t n, float* amaxes) {
    if (rows == 1 || format_.one_scale()) {
      for (int64_t r = row; r < row + rows; ++r)
        if (add_row(reader_.read(r, column, n), column, n, amaxes)) count(r, column, n);
      return;
    }
    if (fold(row, rows, column, n))
      for (int64_t r = row; r < row + rows; ++r) count(r, column, n);
    add_row(magnitudes_.data(), column, n, amaxes);
  }

 private:
  // Folds the columns' magnitudes into magnitudes_, directly from the rows if the kernels can read them there.
  bool fold(int64_t row, int64_t rows, int64_t column, int64_t n) {
    const auto bytes = static_cast<int64_t>(bytes_);
    const auto columns = static_cast<size_t>(n);
    std::memset(magnitudes_.data(), 0, columns * bytes_);
    if (bytes_of(box_.dtype, 1) == bytes && box_.column_stride == bytes && box_.row_stride > 0)
      return kernels_.fold[type_](reader_.read(row, column, n), static_cast<size_t>(box_.row_stride),
                                  static_cast<size_t>(rows), columns, magnitudes_.data());
    bool nonfinite = false;
    for (int64_t r = row; r < row + rows; ++r)
      nonfinite |= kernels_.fold[type_](reader_.read(r, column, n), 0, 1, columns, magnitudes_.data());
    return nonfinite;
  }

  bool add_row(const std::byte* values, int64_t column, int64_t n, float* amaxes) {
    bool nonfinite = false;
    const int64_t head = format_.one_scale() ? n : elements_before_block(format_, box_.column + column, n);
    if (head > 0) nonfinite = kernels_.row[type_](values, static_cast<size_t>(head), *amaxes++);
    if (head == n) return nonfinite;
    const int64_t rest = n - head;
    nonfinite |= kernels_.blocks[type_](values + static_cast<size_t>(head) * bytes_, static_cast<size_t>(rest),
                                        static_cast<size_t>(format_.block_columns), blocks_.data());
    const int64_t blocks = (rest + format_.block_columns - 1) / format_.block_columns;
    for (int64_t b = 0; b < blocks; ++b) amaxes[b] = std::max(amaxes[b], blocks_[static_cast<size_t>(b)]);
    return nonfinite;
  }

  void count(int64_t row, int64_t column, int64_t n) {
    const auto to_f32 = cast_row(quantized_input(box_.dtype), DType::kF32);
    const std::byte* values = reader_.read(row, column, n);
    for (int64_t i = 0; i < n; ++i) {
      float value = 0;
      to_f32(values + static_cast<size_t>(i) * bytes_, &value, 1);
      if (std::isfinite(value)) continue;
      ++found_.count;
      if (found_.row >= 0 && (found_.row < row || (found_.row == row && found_.column <= column + i))) continue;
      found_.row = row;
      found_.column = column + i;
      found_.value = value;
    }
  }

  const BlockFormat& format_;
  const SourceBox& box_;
  NonfiniteElements& found_;
  BoxReader reader_;
  const AmaxKernels& kernels_;
  const size_t type_;
  const size_t bytes_;
  alignas(64) std::array<std::byte, kStrip * sizeof(float)> magnitudes_;
  std::array<float, kStripBlocks> blocks_;
};

}  // namespace

BlockFormat::BlockFormat(Format format, NvScaling scaling) : spec{.format = format, .scaling = scaling} {
  const PlaneShape plane = plane_shape(spec, Plane::kRow, 0, 0);
  codes = plane.code_dtype;
  scales = plane.scale_dtype;
  const BlockShape block = block_shape(spec, Plane::kRow);
  block_rows = block.rows == 0 ? kAll : block.rows;
  block_columns = block.columns == 0 ? kAll : block.columns;
}

int64_t BlockFormat::bits_of_256() const {
  const int64_t code_bits = 256 * bits_of(codes);
  if (one_scale()) return code_bits;
  const int64_t block = block_rows * block_columns;
  return code_bits + (256 * bits_of(scales) + block - 1) / block;
}

void add_block_amaxes(const BlockFormat& format, const SourceBox& box, const BlockGrid<float>& grid,
                      NonfiniteElements& found) {
  AmaxGatherer gatherer(format, box, found);
  const int64_t first_block = box.column / format.block_columns;
  for_each_block_row(format, box.row, box.rows, [&](int64_t row, int64_t rows, int64_t block_row) {
    for_each_strip(box.column, box.columns, [&](int64_t column, int64_t n) {
      const int64_t block = (box.column + column) / format.block_columns - first_block;
      gatherer.add(row, rows, column, n, grid.first + block_row * grid.stride + block);
    });
  });
}

BlockEncoder::BlockEncoder(const BlockFormat& format, DType input) : format_(format), input_(quantized_input(input)) {}

// Codes of one box.
class BlockEncoder::Job {
 public:
  Job(const BlockFormat& format, const BlockScaler& scaler, const SourceBox& box)
      : format_(format),
        scaler_(scaler),
        box_(box),
        reader_(box),
        encode_(scaler.encode()),
        bytes_(bytes_of(quantized_input(box.dtype), 1)) {}

  // Encodes columns [column, column + n) of rows in one block row; `amaxes` begins with the first column's block.
  void run(int64_t row, int64_t rows, int64_t column, int64_t n, const float* amaxes, const CodeRows<std::byte>& to) {
    const int64_t first = box_.column + column;
    const int64_t blocks = (first + n - 1) / format_.block_columns - first / format_.block_columns + 1;
    scale(amaxes, blocks);
    const int64_t code = column + (to.odd ? 1 : 0);  // in the row's bytes
    const bool aligned = !format_.packed() || format_.one_scale() || first % 2 == code % 2;
    for (int64_t r = row; r < row + rows; ++r) {
      std::byte* codes = to.codes + r * to.row_bytes + (format_.packed() ? code / 2 : code);
      const std::byte* values = reader_.read(r, column, n);
      if (aligned) {
        encode_aligned(values, first, n, codes);
      } else {
        encode_shifted(values, first, n, code % 2 != 0, column > 0, codes);
      }
    }
  }

  // Scales and multipliers of blocks.
  void scale(const float* amaxes, int64_t n) {
    if (format_.one_scale())
      multipliers_[0] = scaler_.whole().multiplier;
    else
      scaler_.scale(amaxes, static_cast<size_t>(n), scales_.data(), multipliers_.data());
  }

 private:
  const float* multiplier(int64_t first, int64_t column) const {
    return multipliers_.data() + (column / format_.block_columns - first / format_.block_columns);
  }

  // For f4 whose blocks begin at whole bytes. `first` is the first element's column.
  void encode_aligned(const std::byte* values, int64_t first, int64_t n, std::byte* codes) const {
    int64_t at = first;
    int64_t end = first + n;
    const auto from = [&](int64_t column) { return values + (column - first) * bytes_; };
    if (format_.packed() && at % 2 != 0) {
      encode_one(from(at), *multiplier(first, at), true, codes++);
      ++at;
    }
    const bool lone_last = format_.packed() && (end - at) % 2 != 0;
    if (lone_last) --end;
    const auto advance = [&](int64_t elements) {
      at += elements;
      codes += format_.packed() ? elements / 2 : elements;
    };
    const int64_t head = format_.one_scale() ? end - at : elements_before_block(format_, at, end - at);
    if (head > 0) {
      encode_(from(at), static_cast<size_t>(head), kWholeRow, multiplier(first, at), codes);
      advance(head);
    }
    if (at < end) {
      encode_(from(at), static_cast<size_t>(end - at), static_cast<size_t>(format_.block_columns),
              multiplier(first, at), codes);
      advance(end - at);
    }
    if (lone_last) encode_one(from(at), *multiplier(first, at), false, codes);
  }

  void encode_one(const std::byte* value, float multiplier, bool high, std::byte* code) const {
    alignas(8) std::array<std::byte, 2 * sizeof(float)> pair{};
    std::memcpy(pair.data() + (high ? bytes_ : 0), value, static_cast<size_t>(bytes_));
    const std::array<float, 2> multipliers{high ? 0 : multiplier, high ? multiplier : 0};
    encode_(pair.data(), 2, kEach, multipliers.data(), code);
  }

  // For f4 whose blocks begin in the middle of a byte. `joined`: the first byte's other nibble belongs to the strip
  // before.
  void encode_shifted(const std::byte* values, int64_t first, int64_t n, bool odd, bool joined, std::byte* codes) {
    const int64_t before = odd ? 1 : 0;
    const int64_t total = (before + n + 1) / 2 * 2;
    std::memset(shifted_.data(), 0, static_cast<size_t>(total * bytes_));
    std::memcpy(shifted_.data() + before * bytes_, values, static_cast<size_t>(n * bytes_));
    each_[0] = 0;
    each_[static_cast<size_t>(total - 1)] = 0;
    for (int64_t i = 0; i < n; ++i) each_[static_cast<size_t>(before + i)] = *multiplier(first, first + i);
    const std::byte kept = joined && odd ? codes[0] : std::byte{0};
    encode_(shifted_.data(), static_cast<size_t>(total), kEach, each_.data(), codes);
    codes[0] |= kept;
  }

  const BlockFormat& format_;
  const BlockScaler& scaler_;
  const SourceBox& box_;
  BoxReader reader_;
  const EncodeRow encode_;
  const int64_t bytes_;
  std::array<std::byte, kStripBlocks * sizeof(float)> scales_;
  std::array<float, kStripBlocks> multipliers_;
  alignas(64) std::array<std::byte, (kStrip + 2) * sizeof(float)> shifted_;
  std::array<float, kStrip + 2> each_;
};

void BlockEncoder::scales(float amax, const float* block_amaxes, int64_t n, std::byte* scales) const {
  const BlockScaler scaler(format_.spec, amax, input_);
  if (format_.one_scale()) {
    for (int64_t b = 0; b < n; ++b)
      std::memcpy(scales + b * format_.scale_bytes(), &scaler.whole().stored, sizeof(float));
    return;
  }
  std::array<float, kStripBlocks> multipliers;
  for (int64_t b = 0; b < n; b += kStripBlocks)
    scaler.scale(block_amaxes + b, static_cast<size_t>(std::min(n - b, kStripBlocks)),
                 scales + b * format_.scale_bytes(), multipliers.data());
}

void BlockEncoder::codes(float amax, const SourceBox& box, const BlockGrid<const float>& grid,
                         const CodeRows<std::byte>& to) const {
  const BlockScaler scaler(format_.spec, amax, input_);
  Job job(format_, scaler, box);
  const int64_t first_block = box.column / format_.block_columns;
  for_each_block_row(format_, box.row, box.rows, [&](int64_t row, int64_t rows, int64_t block_row) {
    for_each_strip(box.column, box.columns, [&](int64_t column, int64_t n) {
      const int64_t block = (box.column + column) / format_.block_columns - first_block;
      job.run(row, rows, column, n, grid.first + block_row * grid.stride + block, to);
    });
  });
}

}  // namespace tessera::codec
