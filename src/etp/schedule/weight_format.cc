#include "etp/schedule/weight_format.h"

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "base/fail.h"
#include "layout/text_reader.h"

namespace tessera::etp {
namespace {

constexpr std::array kDTypes{DType::kF32, DType::kBF16, DType::kF16};
constexpr std::array kFormats{Format::kFp8E4M3, Format::kMxfp8, Format::kFp8Block128x128, Format::kNvfp4};

constexpr int64_t kPlainAlignment = 16;

std::string names() {
  std::vector<std::string_view> all;
  for (const WeightFormat& format : WeightFormat::all()) all.push_back(to_string(format));
  return fmt::format("{}", fmt::join(all, ", "));
}

}  // namespace

WeightFormat::WeightFormat(DType dtype) : what_(dtype) {
  if (std::ranges::find(kDTypes, dtype) == kDTypes.end())
    fail(ErrorCode::kInvalidArgument, "a weight cannot travel as {}: use one of {}"_message, to_string(dtype), names());
}

WeightFormat::WeightFormat(Format format) : what_(format) {
  if (std::ranges::find(kFormats, format) == kFormats.end())
    fail(ErrorCode::kInvalidArgument, "a weight cannot travel as {}: use one of {}"_message, to_string(format),
         names());
}

std::span<const WeightFormat> WeightFormat::all() {
  static const std::vector<WeightFormat> formats = [] {
    std::vector<WeightFormat> list;
    for (const DType dtype : kDTypes) list.emplace_back(dtype);
    for (const Format format : kFormats) list.emplace_back(format);
    return list;
  }();
  return formats;
}

WeightFormat WeightFormat::parse(std::string_view name) {
  std::string lower(name);
  std::ranges::transform(lower, lower.begin(),
                         [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c | 32) : c; });
  const auto found =
      std::ranges::find(all(), std::string_view(lower), [](const WeightFormat& f) { return to_string(f); });
  if (found != all().end()) return *found;
  try {
    return WeightFormat(parse_dtype(name));
  } catch (const Error&) {
    fail(ErrorCode::kInvalidArgument, "unknown weight format {}: use one of {}"_message, tessera::quoted(name),
         names());
  }
}

QuantSpec WeightFormat::spec() const {
  return {.format = format()};
}

int64_t WeightFormat::alignment() const {
  if (!quantised()) return kPlainAlignment;
  const QuantSpec quant = spec();
  return std::max({kPlainAlignment, block_shape(quant, Plane::kRow).rows, block_shape(quant, Plane::kColumn).rows});
}

bool WeightFormat::one_plane() const {
  return !quantised() || column_is_transposed_row(spec());
}

int64_t WeightFormat::wire_bytes(Plane plane, int64_t rows, int64_t columns) const {
  if (!quantised()) return bytes_of(dtype(), rows * columns);
  const PlaneShape shape = plane_shape(spec(), gathered(plane), rows, columns);
  return shape.code_bytes() + shape.scale_bytes();
}

int64_t WeightFormat::publication_bytes(DType parameter, int64_t rows, int64_t columns) const {
  if (in_place(parameter)) return 0;
  return quantised() ? quantized_layout(spec(), planes(), 1, rows, columns).bytes : bytes_of(dtype(), rows * columns);
}

std::string_view to_string(const WeightFormat& format) {
  return format.quantised() ? to_string(format.format()) : to_string(format.dtype());
}

}  // namespace tessera::etp
