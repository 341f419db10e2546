#include "tools/quantised_slice.h"

#include <algorithm>
#include <cstring>

#include "codec/simd/cast.h"
#include "tools/interrupt.h"

namespace tessera::tools {
namespace {

constexpr Index kBlockRows = 128;                  // of the tallest block: bands begin at whole blocks
constexpr int64_t kBandBytes = int64_t{16} << 20;  // of a band, about

Index band_rows(Index columns) {
  const Index rows = kBandBytes / std::max<Index>(bytes_of(DType::kF32, columns), 1);
  return std::max(rows / kBlockRows, Index{1}) * kBlockRows;
}

// Calls visit(Interval) for bands that together cover the rows.
template <typename Visit>
void for_each_band(Index rows, Index columns, const Visit& visit) {
  const Index step = band_rows(columns);
  for (Index row = 0; row < rows; row += step) visit(Interval{row, std::min(row + step, rows)});
}

std::span<std::byte> sized(std::vector<std::byte>& buffer, int64_t bytes) {
  if (buffer.size() < static_cast<size_t>(bytes)) buffer.resize(static_cast<size_t>(bytes));
  return std::span(buffer).first(static_cast<size_t>(bytes));
}

// The dtype that quantize() and dequantize() use for it.
DType computed(DType dtype) {
  return dtype == DType::kF64 ? DType::kF32 : dtype;
}

std::span<const std::byte> cast(DType from, DType to, std::span<const std::byte> values, int64_t count,
                                std::vector<std::byte>& buffer) {
  if (from == to) return values;
  const auto result = sized(buffer, bytes_of(to, count));
  cast_row(from, to)(values.data(), result.data(), static_cast<size_t>(count));
  return result;
}

// Calls visit(place) for every index of the region's stack dims, row-major.
template <typename Visit>
void for_each_matrix(const Region& region, std::vector<IntervalSet>& place, const Visit& visit) {
  const auto d = static_cast<int>(place.size());
  if (d + 2 == region.ndim()) return visit(place);
  for (const Interval& interval : region.dim(d).intervals())
    for (Index i = interval.begin; i < interval.end; ++i) {
      place.push_back(IntervalSet(Interval{i, i + 1}));
      for_each_matrix(region, place, visit);
      place.pop_back();
    }
}

}  // namespace

MatrixView QuantisedSlices::load(const Matrix& matrix, const Interval& rows) {
  std::vector<IntervalSet> dims = matrix.place;
  dims.push_back(IntervalSet(rows));
  dims.push_back(IntervalSet(Interval{0, matrix.columns()}));
  const DType dtype = matrix.tensor.dtype;
  const int64_t count = rows.size() * matrix.columns();
  const auto raw = sized(raw_, bytes_of(dtype, count));
  checkpoint_.read_slice(matrix.tensor.name, Region(std::move(dims)), raw);
  const auto values = cast(dtype, computed(dtype), raw, count, values_);
  return {values.data(), computed(dtype), rows.size(), matrix.columns(), matrix.columns()};
}

float QuantisedSlices::amax_of(const Matrix& matrix, const Interrupt& interrupt) {
  float amax = 0;
  for_each_band(matrix.rows(), matrix.columns(), [&](const Interval& band) {
    interrupt.check();
    const MatrixView view = load(matrix, band);
    amax = std::max(amax, compute_amax({&view, 1}).front().value);
  });
  return amax;
}

std::span<const std::byte> QuantisedSlices::decode(const Matrix& matrix, const Interval& rows, const QuantSpec& spec,
                                                   float amax, DType dtype) {
  const MatrixView view = load(matrix, rows);
  const PlaneShape shape = plane_shape(spec, Plane::kRow, view.rows, view.columns);
  std::byte* codes = sized(codes_, shape.code_bytes()).data();
  std::byte* scales = sized(scales_, shape.scale_bytes()).data();
  quantize(view, spec, {.row = amax},
           {.row = {codes, shape.code_row_bytes(), scales, shape.scale_row_bytes()}, .column = {}});
  const int64_t count = view.rows * view.columns;
  const auto decoded = sized(decoded_, bytes_of(computed(dtype), count));
  dequantize(spec, Plane::kRow, {codes, shape.code_row_bytes(), scales, shape.scale_row_bytes()}, amax,
             {decoded.data(), computed(dtype), view.rows, view.columns, view.columns});
  return cast(computed(dtype), dtype, decoded, count, cast_);
}

void QuantisedSlices::read(const TensorInfo& tensor, Format format, const Region& region, DType dtype,
                           std::span<std::byte> dst, const Interrupt& interrupt) {
  const QuantSpec spec{.format = format, .nonfinite = Nonfinite::kPropagate};
  const IntervalSet& rows = region.dim(region.ndim() - 2);
  const IntervalSet& columns = region.dim(region.ndim() - 1);
  std::byte* to = dst.data();
  std::vector<IntervalSet> place;
  for_each_matrix(region, place, [&](const std::vector<IntervalSet>& at) {
    const Matrix matrix{tensor, at};
    const float amax = needs_amax(format) ? amax_of(matrix, interrupt) : 0;
    for_each_band(matrix.rows(), matrix.columns(), [&](const Interval& band) {
      const IntervalSet wanted = rows.intersect(IntervalSet(band));
      if (wanted.empty()) return;
      interrupt.check();
      const auto decoded = decode(matrix, band, spec, amax, dtype);
      for (const Interval& run : wanted.intervals())
        for (Index row = run.begin; row < run.end; ++row)
          for (const Interval& part : columns.intervals()) {
            const auto bytes = static_cast<size_t>(bytes_of(dtype, part.size()));
            std::memcpy(to, decoded.data() + bytes_of(dtype, (row - band.begin) * matrix.columns() + part.begin),
                        bytes);
            to += bytes;
          }
    });
  });
}

}  // namespace tessera::tools
