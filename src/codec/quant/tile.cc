#include "codec/quant/tile.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "codec/quant/matrix.h"
#include "codec/quant/row_coder.h"
#include "codec/simd/cast.h"
#include "codec/simd/kernel_set.h"
#include "codec/simd/stream.h"

namespace tessera::codec {
namespace {

bool is_mx(const QuantSpec& spec) {
  return spec.format == Format::kMxfp8 || spec.format == Format::kMxfp8E5M2;
}

// A tile's rows in a transposed plane should be whole cache lines; MXFP8's column blocks are 32 rows high.
constexpr TileGrid::Tile kTransposed{0, 0, 512, 512};
constexpr TileGrid::Tile kTransposedF32{0, 0, 256, 512};
constexpr TileGrid::Tile kMxBoth{0, 0, 32, 1024};
constexpr TileGrid::Tile kRowsAlone{0, 0, 16, 16384};
constexpr TileGrid::Tile kHighBlocks{0, 0, 128, 1024};

TileGrid::Tile tile_size(const MatrixView& matrix, const QuantSpec& spec, const Planes& planes) {
  if (planes.column.codes != nullptr) {
    if (is_mx(spec)) return kMxBoth;
    return matrix.dtype == DType::kF32 ? kTransposedF32 : kTransposed;
  }
  return block_shape(spec, Plane::kRow).rows > kRowsAlone.rows ? kHighBlocks : kRowsAlone;
}

template <typename T>
T* reserve(std::vector<T>& memory, size_t n) {
  if (memory.size() < n) memory.resize(n);
  return memory.data();
}

std::byte* at(const PlaneMemory& plane, int64_t row, int64_t byte) {
  return plane.codes + row * plane.code_stride + byte;
}
std::byte* scale_at(const PlaneMemory& plane, int64_t row, int64_t byte) {
  return plane.scales + row * plane.scale_stride + byte;
}

class TileQuantizer {
 public:
  TileQuantizer(const TileGrid& grid, size_t index, PlaneAmax amax, const Origin& origin, TileScratch& scratch)
      : matrix_(grid.matrix()),
        spec_(grid.spec()),
        planes_(grid.planes()),
        tile_(grid.tile(index)),
        amax_(amax),
        origin_(origin),
        scratch_(scratch) {}

  bool run() {
    const Rows input = rows_of_tile();
    if (planes_.column.codes == nullptr) return row_plane(input, row_target());
    if (is_mx(spec_)) {
      bool nonfinite = planes_.row.codes != nullptr && row_plane(input, row_target());
      nonfinite |= mx_column_plane(input);
      return nonfinite;
    }
    if (codes_are_shared()) return both_from_row(input);
    const bool nonfinite = planes_.row.codes != nullptr && row_plane(input, row_target());
    return transposed_plane(input) || nonfinite;
  }

 private:
  bool codes_are_shared() const {
    const bool packs_rows = spec_.format != Format::kNvfp4 || tile_.columns % 2 == 0;
    const bool same_amax = planes_.row.codes == nullptr || amax_.row == amax_.column;
    return column_is_transposed_row(spec_) && packs_rows && same_amax;
  }

  Rows rows_of_tile() const {
    return {.data = row_of(matrix_, tile_.row) + tile_.column * bytes_of(matrix_.dtype, 1),
            .stride = static_cast<size_t>(row_bytes_apart(matrix_)),
            .rows = static_cast<size_t>(tile_.rows),
            .columns = static_cast<size_t>(tile_.columns),
            .dtype = matrix_.dtype};
  }

  // The first byte of the codes and scales of a tile that begins at [row, column] of a plane.
  PlaneMemory target(const PlaneMemory& plane, int64_t row, int64_t column) const {
    const BlockShape block = block_shape(spec_, Plane::kRow);
    const PlaneShape unit = plane_shape(spec_, Plane::kRow, 0, 0);
    PlaneMemory memory = plane;
    memory.codes = at(plane, row, bytes_of(unit.code_dtype, column));
    if (block.columns == 0) return memory;
    const bool repeated = unit.scale_dtype != DType::kF32;
    memory.scales =
        scale_at(plane, repeated ? row : row / block.rows, bytes_of(unit.scale_dtype, column / block.columns));
    return memory;
  }
  PlaneMemory row_target() const { return target(planes_.row, tile_.row, tile_.column); }
  PlaneMemory column_target() const { return target(planes_.column, tile_.column, tile_.row); }

  // Where row `r` of the tile begins in the whole plane, for stochastic rounding.
  DrawRows draws(Plane plane) const {
    const int64_t rows = origin_.rows == 0 ? matrix_.rows : origin_.rows;
    const int64_t columns = origin_.columns == 0 ? matrix_.columns : origin_.columns;
    const int64_t row = origin_.first_row + tile_.row;
    const int64_t column = origin_.first_column + tile_.column;
    const bool across = plane == Plane::kRow;
    const int64_t width = across ? columns : rows;
    const int64_t first = origin_.first_element + (across ? row * width + column : column * width + row);
    return {{.seed = spec_.seed, .plane = across ? 0U : 1U, .first_element = static_cast<uint64_t>(first)},
            static_cast<uint64_t>(width)};
  }

  bool row_plane(const Rows& input, const PlaneMemory& to) {
    return RowCoder(spec_, amax_.row, input.dtype, draws(Plane::kRow), scratch_).encode(input, to);
  }

  bool mx_column_plane(const Rows& input) {
    const PlaneMemory& plane = planes_.column;
    PlaneMemory to = plane;
    to.codes = at(plane, tile_.row, tile_.column);
    to.scales = scale_at(plane, tile_.row / block_shape(spec_, Plane::kColumn).rows, tile_.column);
    return RowCoder(spec_, 0, input.dtype, {}, scratch_).encode_columns(input, to);
  }

  bool both_from_row(const Rows& input) {
    const PlaneShape shape = plane_shape(spec_, Plane::kRow, tile_.rows, tile_.columns);
    const PlaneShape turned = plane_shape(spec_, Plane::kColumn, tile_.rows, tile_.columns);
    const bool wanted = planes_.row.codes != nullptr;
    const PlaneMemory row =
        wanted ? row_target() : with_scratch_codes(scratch_scales(shape), shape, scratch_.row_codes);
    const bool nonfinite = RowCoder(spec_, amax_.column, input.dtype, {}, scratch_).encode(input, row);
    const PlaneMemory column = with_scratch_codes(column_target(), turned, scratch_.column_codes);
    transpose_codes_and_scales(spec_, tile_.rows, tile_.columns,
                               {row.codes, row.code_stride, row.scales, row.scale_stride}, column);
    copy_codes(column, turned, column_target());
    return nonfinite;
  }

  PlaneMemory scratch_scales(const PlaneShape& shape) const {
    return {nullptr, 0, reserve(scratch_.row_scales, static_cast<size_t>(shape.scale_bytes())),
            shape.scale_row_bytes()};
  }

  // Rows of a plane or a tile may be a power of two apart, and then share few cache sets.
  static int64_t padded(int64_t row_bytes) {
    constexpr int64_t kLine = 64;
    return (row_bytes + kLine - 1) / kLine * kLine + kLine;
  }

  static PlaneMemory with_scratch_codes(PlaneMemory plane, const PlaneShape& shape, std::vector<std::byte>& memory) {
    plane.code_stride = padded(shape.code_row_bytes());
    plane.codes = reserve(memory, static_cast<size_t>(shape.code_rows * plane.code_stride));
    return plane;
  }

  // Bypasses the caches, with whole lines at a time.
  static void copy_codes(const PlaneMemory& from, const PlaneShape& shape, const PlaneMemory& to) {
    copy_stream_rows(to.codes, to.code_stride, from.codes, from.code_stride,
                     static_cast<size_t>(shape.code_row_bytes()), static_cast<size_t>(shape.code_rows));
  }

  // Quantises the transposed input.
  bool transposed_plane(Rows input) {
    const auto element = static_cast<size_t>(bytes_of(input.dtype, 1));
    const TransposeKernels& kernels = *active_kernels().transpose;
    if (spec_.hadamard) {
      const auto stride = static_cast<size_t>(padded(static_cast<int64_t>(input.columns * element)));
      std::byte* transformed = reserve(scratch_.transformed, input.rows * stride);
      for (size_t r = 0; r < input.rows; r += kHadamard)
        kernels.hadamard(input.data + r * input.stride, input.stride, input.columns, transformed + r * stride, stride);
      input.data = transformed;
      input.stride = stride;
    }
    const auto stride = static_cast<size_t>(padded(static_cast<int64_t>(input.rows * element)));
    std::byte* transposed = reserve(scratch_.input, input.columns * stride);
    kernels.elements[element / 2](input.data, input.stride, input.rows, input.columns, transposed, stride);
    const PlaneShape shape = plane_shape(spec_, Plane::kColumn, tile_.rows, tile_.columns);
    const PlaneMemory column = with_scratch_codes(column_target(), shape, scratch_.column_codes);
    const bool nonfinite = RowCoder(spec_, amax_.column, input.dtype, draws(Plane::kColumn), scratch_)
                               .encode({transposed, stride, input.columns, input.rows, input.dtype}, column);
    copy_codes(column, shape, column_target());
    return nonfinite;
  }

  const MatrixView& matrix_;
  const QuantSpec& spec_;
  const Planes& planes_;
  const TileGrid::Tile tile_;
  const PlaneAmax amax_;
  const Origin& origin_;
  TileScratch& scratch_;
};

}  // namespace

TileGrid::TileGrid(const MatrixView& matrix, const QuantSpec& spec, const Planes& planes)
    : matrix_(matrix), spec_(spec), planes_(planes) {
  const Tile size = tile_size(matrix, spec, planes);
  tile_rows_ = size.rows;
  tile_columns_ = size.columns;
  down_ = (matrix.rows + tile_rows_ - 1) / tile_rows_;
  across_ = (matrix.columns + tile_columns_ - 1) / tile_columns_;
}

TileGrid::Tile TileGrid::tile(size_t index) const {
  const int64_t row = static_cast<int64_t>(index) / across_ * tile_rows_;
  const int64_t column = static_cast<int64_t>(index) % across_ * tile_columns_;
  return {row, column, std::min(tile_rows_, matrix_.rows - row), std::min(tile_columns_, matrix_.columns - column)};
}

bool quantize_tile(const TileGrid& grid, size_t index, PlaneAmax amax, const Origin& origin, TileScratch& scratch) {
  const bool nonfinite = TileQuantizer(grid, index, amax, origin, scratch).run();
  stream_fence();
  return nonfinite;
}

}  // namespace tessera::codec
