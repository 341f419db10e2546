#include "codec/quant/block_scaler.h"
#include "codec/quant/blocks.h"
#include "codec/quant/box_rows.h"
#include "codec/quant/matrix.h"
#include "codec/simd/kernel_set.h"

namespace tessera::codec {

BlockDecoder::BlockDecoder(const BlockFormat& format, float amax) : format_(format), code_(code_index(format.codes)) {
  if (format.scales != DType::kF32) table_ = scale_table(format.spec.format, amax);
}

// Decodes one box.
class BlockDecoder::Job {
 public:
  Job(const BlockDecoder& decoder, const TargetBox& box)
      : decoder_(decoder),
        format_(decoder.format_),
        box_(box),
        writer_(box),
        decode_(active_kernels().decode->row[decoder.code_][index_of(quantized_input(box.dtype))]),
        bytes_(bytes_of(quantized_input(box.dtype), 1)) {}

  // Decodes columns [column, column + n) of rows in one block row; `scales` begins with the first column's block.
  void run(int64_t row, int64_t rows, int64_t column, int64_t n, const std::byte* scales,
           const CodeRows<const std::byte>& from) {
    const int64_t first = box_.column + column;
    const int64_t blocks = (first + n - 1) / format_.block_columns - first / format_.block_columns + 1;
    load(scales, blocks);
    const int64_t code = column + (from.odd ? 1 : 0);  // in the row's bytes
    const bool aligned = !format_.packed() || first % 2 == code % 2;
    for (int64_t r = row; r < row + rows; ++r) {
      const std::byte* codes = from.codes + r * from.row_bytes + (format_.packed() ? code / 2 : code);
      std::byte* out = writer_.place(r, column);
      if (aligned) {
        decode_aligned(codes, first, n, out);
      } else {
        decode_shifted(codes, first, n, code % 2 != 0, out);
      }
      writer_.store(r, column, n);
    }
  }

 private:
  void load(const std::byte* scales, int64_t n) {
    if (format_.scales == DType::kF32) {
      std::memcpy(multipliers_.data(), scales, static_cast<size_t>(n) * sizeof(float));
    } else {
      for (int64_t b = 0; b < n; ++b)
        multipliers_[static_cast<size_t>(b)] = decoder_.table_[static_cast<uint8_t>(scales[b])];
    }
  }

  const float* multiplier(int64_t first, int64_t column) const {
    return multipliers_.data() + (column / format_.block_columns - first / format_.block_columns);
  }

  void decode_aligned(const std::byte* codes, int64_t first, int64_t n, std::byte* out) const {
    int64_t at = first;
    int64_t end = first + n;
    const auto to = [&](int64_t column) { return out + (column - first) * bytes_; };
    if (format_.packed() && at % 2 != 0) {
      decode_one(codes++, *multiplier(first, at), true, to(at));
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
      decode_(codes, static_cast<size_t>(head), kWholeRow, multiplier(first, at), to(at));
      advance(head);
    }
    if (at < end) {
      decode_(codes, static_cast<size_t>(end - at), static_cast<size_t>(format_.block_columns), multiplier(first, at),
              to(at));
      advance(end - at);
    }
    if (lone_last) decode_one(codes, *multiplier(first, at), false, to(at));
  }

  void decode_one(const std::byte* code, float multiplier, bool high, std::byte* out) const {
    alignas(8) std::array<std::byte, 2 * sizeof(float)> pair;
    decode_(code, 2, kWholeRow, &multiplier, pair.data());
    std::memcpy(out, pair.data() + (high ? bytes_ : 0), static_cast<size_t>(bytes_));
  }

  // For f4 whose blocks begin in the middle of a byte.
  void decode_shifted(const std::byte* codes, int64_t first, int64_t n, bool odd, std::byte* out) {
    const int64_t before = odd ? 1 : 0;
    const int64_t total = (before + n + 1) / 2 * 2;
    each_[0] = 0;
    each_[static_cast<size_t>(total - 1)] = 0;
    for (int64_t i = 0; i < n; ++i) each_[static_cast<size_t>(before + i)] = *multiplier(first, first + i);
    decode_(codes, static_cast<size_t>(total), kEach, each_.data(), shifted_.data());
    std::memcpy(out, shifted_.data() + before * bytes_, static_cast<size_t>(n * bytes_));
  }

  const BlockDecoder& decoder_;
  const BlockFormat& format_;
  const TargetBox& box_;
  BoxWriter writer_;
  void (*const decode_)(const std::byte*, size_t, size_t, const float*, void*);
  const int64_t bytes_;
  std::array<float, kStripBlocks> multipliers_;
  alignas(64) std::array<std::byte, (kStrip + 2) * sizeof(float)> shifted_;
  std::array<float, kStrip + 2> each_;
};

void BlockDecoder::decode(const CodeRows<const std::byte>& from, const BlockGrid<const std::byte>& scales,
                          const TargetBox& to) const {
  Job job(*this, to);
  const int64_t first_block = to.column / format_.block_columns;
  for_each_block_row(format_, to.row, to.rows, [&](int64_t row, int64_t rows, int64_t block_row) {
    for_each_strip(to.column, to.columns, [&](int64_t column, int64_t n) {
      const int64_t block = (to.column + column) / format_.block_columns - first_block;
      const std::byte* line = scales.first + block_row * scales.stride + block * format_.scale_bytes();
      job.run(row, rows, column, n, line, from);
    });
  });
}

}  // namespace tessera::codec
