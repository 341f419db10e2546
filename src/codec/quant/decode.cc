#include "codec/quant/decode.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "base/fail.h"
#include "codec/quant/block_scaler.h"
#include "codec/quant/matrix.h"
#include "codec/simd/kernel_set.h"
#include "codec/simd/transpose.h"

namespace tessera::codec {
namespace {

constexpr int64_t kPiece = 1024;  // columns of a row that are decoded at a time; whole blocks
// How far ahead codes of rows are prefetched: in bytes, or in rows where several of them share their scales.
constexpr int64_t kAhead = 2048;
constexpr int64_t kRowsAhead = 2;
// Transposed codes are decoded in tiles: so many columns, a cache line of each.
constexpr int64_t kLine = 64;
constexpr int64_t kTileColumns = 256;

void prefetch(const std::byte* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(p + i);
}

int64_t to_multiple(int64_t position, int64_t of) {
  return of - position % of;
}

bool is_power(float scale) {
  return scale >= power_of_two(kLeastPower) && scale <= power_of_two(kMostPower) &&
         (std::bit_cast<uint32_t>(scale) & 0x7FFFFF) == 0;
}

}  // namespace

PlaneDecoder::PlaneDecoder(const QuantSpec& spec, Plane plane, int64_t columns, DType to)
    : format_(spec.format), to_(to), block_(block_shape(spec, plane)), columns_(columns) {
  check_matrix({.data = nullptr, .dtype = to, .rows = 0, .columns = columns, .row_stride = columns});
  if (spec.hadamard && plane == Plane::kColumn)
    fail(
        ErrorCode::kInvalidArgument,
        "the column plane holds the Hadamard transform of the matrix, not the matrix: dequantize the row plane"_message);
  const PlaneShape shape = plane_shape(spec, plane, 0, columns);
  code_dtype_ = shape.code_dtype;
  scale_dtype_ = shape.scale_dtype;
  transposed_ = plane == Plane::kColumn && scale_dtype_ != DType::kF8E8M0;
  repeated_ = format_ == Format::kNvfp4;
}

// One call of box().
class PlaneDecoder::Job {
 public:
  Job(const PlaneDecoder& decoder, const ConstPlaneMemory& from, float amax, const MatrixMemory& to, bool stream)
      : decoder_(decoder),
        from_(from),
        to_(to),
        element_(bytes_of(to.dtype, 1)),
        packed_(decoder.code_dtype_ == DType::kF4),
        one_scale_(decoder.block_.columns == 0) {
    const DecodeKernels& kernels = *active_kernels().decode;
    const size_t code = code_index(decoder.code_dtype_);
    const size_t type = index_of(to.dtype);
    any_ = (stream ? kernels.stream_row : kernels.row)[code][type];
    by_powers_ = (stream ? kernels.stream_row_by_powers : kernels.row_by_powers)[code][type];
    if (decoder.scale_dtype_ != DType::kF32) table_ = scale_table(decoder.format_, amax);
    const BlockShape& block = decoder.block_;
    if (one_scale_) {
      std::memcpy(multipliers_.data(), from.scales, sizeof(float));
      share_ = kWholeRow;
      decode_ = is_power(multipliers_[0]) ? by_powers_ : any_;
    } else {
      share_ = static_cast<size_t>(decoder.transposed_ && decoder.repeated_ ? 1 : block.columns);
      high_ = decoder.transposed_ || share_ == 1 ? block.rows : 1;
    }
  }

  void run(const DecodeBox& box) {
    box_ = box;
    decoder_.transposed_ ? run_transposed() : run_upright();
  }

 private:
  void run_upright() {
    const int64_t bytes = bytes_of(decoder_.code_dtype_, kPiece);
    for (int64_t r = box_.first_row; r < end_row();) {
      const int64_t rows = one_scale_ ? 1 : rows_of_block(r, end_row());
      const int64_t ahead = rows == 1 ? kAhead : kRowsAhead * from_.code_stride;
      for (int64_t c = box_.first_column; c < end_column(); c += kPiece) {
        const std::byte* codes = from_.codes + r * from_.code_stride + bytes_of(decoder_.code_dtype_, c);
        decode_rows(codes, from_.code_stride, r, rows, c, std::min(kPiece, end_column() - c),
                    [&](const std::byte* row) { prefetch(row + ahead, bytes); });
      }
      r += rows;
    }
  }

  // Down first: lines of codes are read from one cache line to the next.
  void run_transposed() {
    for (DecodeBox tile = tile_at(box_.first_row, box_.first_column); tile.columns > 0;) {
      DecodeBox next = tile_at(tile.first_row + tile.rows, tile.first_column);
      if (next.rows == 0) next = tile_at(box_.first_row, tile.first_column + tile.columns);
      transpose_tile(tile);
      decode_tile(tile, next);
      tile = next;
    }
  }

  DecodeBox tile_at(int64_t row, int64_t column) const {
    const int64_t high = packed_ ? 2 * kLine : kLine;
    return {.first_row = row,
            .rows = std::min(to_multiple(row, high), end_row() - row),
            .first_column = column,
            .columns = std::min(kTileColumns, end_column() - column)};
  }

  const std::byte* codes_of(const DecodeBox& tile) const {
    return from_.codes + tile.first_column * from_.code_stride + bytes_of(decoder_.code_dtype_, tile.first_row);
  }

  void transpose_tile(const DecodeBox& tile) {
    const int64_t rows = packed_ ? tile.rows + tile.rows % 2 : tile.rows;
    const int64_t columns = packed_ ? tile.columns - tile.columns % 2 : tile.columns;
    const std::byte* codes = codes_of(tile);
    transpose_codes(decoder_.code_dtype_, codes, from_.code_stride, columns, rows, tile_.data(), tile_stride());
    if (columns < tile.columns)  // the last line, paired with itself
      transpose_codes(decoder_.code_dtype_, codes + columns * from_.code_stride, 0, 2, rows, tile_.data() + columns / 2,
                      tile_stride());
  }

  // Prefetches the codes of the next tile, some with each row.
  void decode_tile(const DecodeBox& tile, const DecodeBox& next) {
    const std::byte* ahead = codes_of(next);
    const int64_t bytes = bytes_of(decoder_.code_dtype_, next.rows);
    const int64_t step = (next.columns + tile.rows - 1) / tile.rows;
    int64_t left = next.columns;
    const auto prefetch_next = [&](const std::byte* /*row*/) {
      for (int64_t i = 0; i < step && left > 0; ++i, --left, ahead += from_.code_stride) prefetch(ahead, bytes);
    };
    for (int64_t r = 0; r < tile.rows;) {
      const int64_t rows = rows_of_block(tile.first_row + r, tile.first_row + tile.rows);
      decode_rows(tile_.data() + r * tile_stride(), tile_stride(), tile.first_row + r, rows, tile.first_column,
                  tile.columns, prefetch_next);
      r += rows;
    }
  }

  // Decodes rows that share their scales; `before(row's codes)` is called before each.
  template <typename Before>
  void decode_rows(const std::byte* codes, int64_t code_stride, int64_t row, int64_t rows, int64_t column,
                   int64_t columns, const Before& before) {
    if (!one_scale_) decode_ = load_scales(row, column, columns) ? by_powers_ : any_;
    const int64_t stride = to_.row_stride * element_;
    std::byte* out =
        static_cast<std::byte*>(to_.data) + (row - box_.first_row) * stride + (column - box_.first_column) * element_;
    for (int64_t r = 0; r < rows; ++r, codes += code_stride, out += stride) {
      before(codes);
      decode_(codes, static_cast<size_t>(columns), share_, multipliers_.data(), out);
    }
  }

  // True if the scales are powers of two as kernels want them.
  bool load_scales(int64_t row, int64_t column, int64_t columns) {
    const BlockShape& block = decoder_.block_;
    const bool transposed = decoder_.transposed_;
    const int64_t bytes = bytes_of(decoder_.scale_dtype_, 1);
    // Position in the plane's scales: its line and the place in it.
    int64_t line = transposed ? column : row;
    if (!decoder_.repeated_) line /= transposed ? block.columns : block.rows;
    const int64_t place = transposed ? row / block.rows : column / block.columns;
    const std::byte* scales = from_.scales + line * from_.scale_stride + place * bytes;
    const int64_t step = transposed ? from_.scale_stride : bytes;
    const auto share = static_cast<int64_t>(share_);
    const auto n = static_cast<size_t>((columns + share - 1) / share);
    if (decoder_.scale_dtype_ == DType::kF32) {
      for (size_t i = 0; i < n; ++i, scales += step) std::memcpy(&multipliers_[i], scales, sizeof(float));
    } else {
      for (size_t i = 0; i < n; ++i, scales += step) multipliers_[i] = table_[static_cast<uint8_t>(*scales)];
    }
    return decoder_.scale_dtype_ != DType::kF8E4M3 &&
           std::all_of(multipliers_.data(), multipliers_.data() + n, is_power);
  }

  int64_t tile_stride() const { return bytes_of(decoder_.code_dtype_, kTileColumns); }
  int64_t rows_of_block(int64_t row, int64_t end) const {
    return one_scale_ ? end - row : std::min(to_multiple(row, high_), end - row);
  }
  int64_t end_row() const { return box_.first_row + box_.rows; }
  int64_t end_column() const { return box_.first_column + box_.columns; }

  const PlaneDecoder& decoder_;
  const ConstPlaneMemory& from_;
  const MatrixMemory& to_;
  const int64_t element_;  // bytes
  const bool packed_;
  const bool one_scale_;
  DecodeRow any_;
  DecodeRow by_powers_;
  DecodeRow decode_;  // of the two, for the loaded scales
  size_t share_;      // elements of a row that share a scale
  int64_t high_ = 0;  // rows that share their scales, unless there is only one
  DecodeBox box_;
  std::array<float, 256> table_;  // multipliers by scale byte
  alignas(kLine) std::array<float, kPiece> multipliers_;
  alignas(kLine) std::array<std::byte, kLine * kTileColumns> tile_;  // codes of a tile, in rows
};

void PlaneDecoder::box(const ConstPlaneMemory& from, int64_t plane_rows, const DecodeBox& box, float amax,
                       const MatrixMemory& to, bool stream) const {
  constexpr int64_t kFirstColumns = 128;  // whole blocks of every format
  TESSERA_CHECK(box.first_row >= 0 && box.rows >= 0 && box.first_row + box.rows <= plane_rows);
  TESSERA_CHECK(box.first_column >= 0 && box.columns >= 0 && box.first_column + box.columns <= columns_);
  TESSERA_CHECK_EQ(box.first_column % kFirstColumns, 0);
  TESSERA_CHECK(to.dtype == to_ && to.rows == box.rows && to.columns == box.columns);
  if (transposed_ && code_dtype_ == DType::kF4) TESSERA_CHECK(box.first_row % 2 == 0 && plane_rows % 2 == 0);
  if (box.rows == 0 || box.columns == 0) return;
  Job(*this, from, amax, to, stream).run(box);
}

void PlaneDecoder::rows(const ConstPlaneMemory& from, int64_t plane_rows, int64_t first_row, int64_t rows, float amax,
                        const MatrixMemory& to, bool stream) const {
  box(from, plane_rows, {.first_row = first_row, .rows = rows, .first_column = 0, .columns = columns_}, amax, to,
      stream);
}

}  // namespace tessera::codec
