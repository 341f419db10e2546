#include <array>
#include <cmath>
#include <string>

#include "base/fail.h"
#include "base/rounding.h"
#include "codec/float/same_name.h"
#include "codec/quant/hadamard.h"
#include "codec/quant/matrix.h"
#include "tessera/layout.h"
#include "tessera/quantize.h"

namespace tessera {
namespace {

struct FormatInfo {
  Format format;
  std::string_view name;
  DType codes;
  DType scales;
  BlockShape block;  // of the row plane
};
constexpr std::array kFormatInfos{
    FormatInfo{Format::kFp8E4M3, "fp8_e4m3", DType::kF8E4M3, DType::kF32, {0, 0}},
    FormatInfo{Format::kFp8E5M2, "fp8_e5m2", DType::kF8E5M2, DType::kF32, {0, 0}},
    FormatInfo{Format::kFp8Block1x128, "fp8_block_1x128", DType::kF8E4M3, DType::kF32, {1, 128}},
    FormatInfo{Format::kFp8Block128x128, "fp8_block_128x128", DType::kF8E4M3, DType::kF32, {128, 128}},
    FormatInfo{Format::kMxfp8, "mxfp8", DType::kF8E4M3, DType::kF8E8M0, {1, 32}},
    FormatInfo{Format::kMxfp8E5M2, "mxfp8_e5m2", DType::kF8E5M2, DType::kF8E8M0, {1, 32}},
    FormatInfo{Format::kNvfp4, "nvfp4", DType::kF4, DType::kF8E4M3, {1, 16}},
};
constexpr auto kFormats = [] {
  std::array<Format, kFormatInfos.size()> formats{};
  for (size_t i = 0; i < kFormatInfos.size(); ++i) formats[i] = kFormatInfos[i].format;
  return formats;
}();

const FormatInfo& format_info(Format format) {
  const auto index = static_cast<size_t>(format);
  TESSERA_CHECK_LT(index, kFormatInfos.size());
  return kFormatInfos[index];
}

bool is_mx(Format format) {
  return format == Format::kMxfp8 || format == Format::kMxfp8E5M2;
}
bool is_one_scale(Format format) {
  return format == Format::kFp8E4M3 || format == Format::kFp8E5M2;
}

constexpr int kMostMargin = 64;
constexpr int64_t kPlaneAlignment = 64;  // of the parts of a QuantizedLayout

}  // namespace

std::string_view to_string(Format format) {
  return format_info(format).name;
}

Format parse_format(std::string_view name) {
  for (const FormatInfo& info : kFormatInfos)
    if (codec::same_name(info.name, name)) return info.format;
  std::string names;
  for (const FormatInfo& info : kFormatInfos) names.append(names.empty() ? "" : ", ").append(info.name);
  fail(ErrorCode::kInvalidArgument, "unknown format '{}': use one of {}"_message, name, names);
}

std::span<const Format> all_formats() {
  return kFormats;
}

std::string_view to_string(Plane plane) {
  return plane == Plane::kRow ? "row" : "column";
}

bool needs_amax(Format format) {
  return is_one_scale(format) || format == Format::kNvfp4;
}

void check_spec(const QuantSpec& spec) {
  const std::string_view name = to_string(spec.format);
  const bool nv = spec.format == Format::kNvfp4;
  const auto refuse = [&](std::string_view what, std::string_view whose) {
    fail(ErrorCode::kInvalidArgument, "{} is only for {}: leave it out for {}"_message, what, whose, name);
  };
  if (spec.hadamard && !nv) refuse("hadamard", "nvfp4");
  if (spec.rounding == Rounding::kStochastic && !nv) refuse("stochastic rounding", "nvfp4");
  const bool fp8 = !nv && !is_mx(spec.format);
  if (spec.eps != 0 && !fp8) refuse("eps", "fp8");
  if (!(spec.eps >= 0 && std::isfinite(spec.eps)))
    fail(ErrorCode::kInvalidArgument, "eps is {}: give a finite number, 0 or more"_message, spec.eps);
  if (spec.power_of_two && !fp8) refuse("power_of_two", "fp8");
  if (spec.margin != 0 && !is_one_scale(spec.format)) refuse("margin", "fp8 with one scale");
  if (std::abs(spec.margin) > kMostMargin)
    fail(ErrorCode::kInvalidArgument, "margin is {}: give {} to {}"_message, spec.margin, -kMostMargin, kMostMargin);
}

BlockShape block_shape(const QuantSpec& spec, Plane plane) {
  BlockShape block = format_info(spec.format).block;
  if (spec.format == Format::kNvfp4 && spec.scaling == NvScaling::k16x16) block.rows = block.columns;
  return plane == Plane::kRow ? block : BlockShape{block.columns, block.rows};
}

PlaneShape plane_shape(const QuantSpec& spec, Plane plane, int64_t rows, int64_t columns) {
  check_spec(spec);
  if (rows < 0 || columns < 0)
    fail(ErrorCode::kInvalidArgument, "a matrix of {} x {}: sizes are 0 or more"_message, rows, columns);
  const FormatInfo& info = format_info(spec.format);
  const auto up = [](int64_t n, int64_t to) { return (n + to - 1) / to; };
  PlaneShape shape{.code_dtype = info.codes, .scale_dtype = info.scales};
  if (plane == Plane::kColumn && is_mx(spec.format)) {
    shape.code_rows = rows;
    shape.code_columns = columns;
    shape.scale_rows = up(rows, info.block.columns);
    shape.scale_columns = columns;
    shape.gemm_rows = round_up(shape.scale_rows, 4);
    shape.gemm_columns = round_up(columns, 128);
    return shape;
  }
  const bool column = plane == Plane::kColumn;
  shape.code_rows = column ? columns : rows;
  shape.code_columns = column ? rows : columns;
  if (info.codes == DType::kF4 && shape.code_columns % 2 != 0)
    fail(
        ErrorCode::kInvalidArgument,
        "the {} plane of a {} x {} matrix in nvfp4 packs pairs along {}, which is odd: take the other plane or pad it"_message,
        to_string(plane), rows, columns, column ? "its rows" : "its columns");
  if (column && spec.hadamard) codec::check_hadamard(DType::kBF16, rows);
  if (is_one_scale(spec.format)) {
    shape.scale_rows = shape.scale_columns = shape.gemm_rows = shape.gemm_columns = 1;
    return shape;
  }
  // A GEMM that reads scales as bytes wants one for each row; the scale of a 16x16 block is repeated.
  const bool bytes = bits_of(info.scales) == 8;
  shape.scale_rows = bytes ? shape.code_rows : up(shape.code_rows, info.block.rows);
  shape.scale_columns = up(shape.code_columns, info.block.columns);
  shape.gemm_rows = bytes ? round_up(shape.scale_rows, 128) : shape.scale_rows;
  shape.gemm_columns = round_up(shape.scale_columns, 4);
  return shape;
}

std::string_view to_string(PlaneSet planes) {
  if (planes.row) return planes.column ? "row and column" : "row";
  return planes.column ? "column" : "none";
}

bool column_is_transposed_row(const QuantSpec& spec) {
  const BlockShape block = block_shape(spec, Plane::kRow);
  return block.rows == block.columns && !spec.hadamard && spec.rounding == Rounding::kNearest;
}

QuantizedLayout quantized_layout(const QuantSpec& spec, PlaneSet planes, int64_t matrices, int64_t rows,
                                 int64_t columns) {
  if (matrices < 0) fail(ErrorCode::kInvalidArgument, "a stack of {} matrices: it has 0 or more"_message, matrices);
  element_count(std::array<int64_t, 4>{matrices, rows, columns, sizeof(float)});
  QuantizedLayout layout;
  const auto take = [&](int64_t bytes) {
    const int64_t at = layout.bytes;
    layout.bytes = round_up(at + matrices * bytes, kPlaneAlignment);
    return at;
  };
  const auto place = [&](Plane plane) {
    QuantizedLayout::Place made{.shape = plane_shape(spec, plane, rows, columns)};
    made.codes = take(made.shape.code_bytes());
    made.scales = take(made.shape.scale_bytes());
    made.amaxes = take(needs_amax(spec.format) ? static_cast<int64_t>(sizeof(float)) : 0);
    made.end = layout.bytes;
    return made;
  };
  if (planes.row) layout.row = place(Plane::kRow);
  if (planes.column) layout.column = place(Plane::kColumn);
  return layout;
}

namespace codec {

void check_matrix(const MatrixView& matrix) {
  if (matrix.dtype != DType::kF32 && matrix.dtype != DType::kF16 && matrix.dtype != DType::kBF16)
    fail(ErrorCode::kInvalidArgument, "a matrix of {} cannot be quantised: cast it to f32, f16 or bf16"_message,
         to_string(matrix.dtype));
  if (matrix.rows < 0 || matrix.columns < 0)
    fail(ErrorCode::kInvalidArgument, "a matrix of {} x {}: sizes are 0 or more"_message, matrix.rows, matrix.columns);
  if (matrix.rows > 1 && matrix.row_stride < matrix.columns)
    fail(ErrorCode::kInvalidArgument, "rows of {} elements that are {} apart overlap"_message, matrix.columns,
         matrix.row_stride);
  if (matrix.rows > 0 && matrix.columns > 0 && matrix.data == nullptr)
    fail(ErrorCode::kInvalidArgument, "a matrix of {} x {} at no address"_message, matrix.rows, matrix.columns);
}

void check_hadamard(DType dtype, int64_t rows) {
  if (dtype != DType::kBF16)
    fail(ErrorCode::kInvalidArgument, "a Hadamard transform of {}: it is defined for bf16"_message, to_string(dtype));
  if (rows % static_cast<int64_t>(kHadamard) != 0)
    fail(ErrorCode::kInvalidArgument, "a Hadamard transform of {} rows: it takes whole groups of {}"_message, rows,
         kHadamard);
}

}  // namespace codec
}  // namespace tessera
