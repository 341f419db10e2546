#include "bus/registration/plane_memory.h"

#include <algorithm>
#include <utility>

#include "base/fail.h"
#include "codec/quant/blocks.h"

namespace tessera::bus {
namespace {

QuantizedLayout layout_of(const TensorSpec& spec, const Region& owned) {
  const Shape extents = owned.extents();
  int64_t matrices = 1;
  for (size_t d = 0; d + 2 < extents.size(); ++d) matrices *= extents[d];
  return quantized_layout({.format = spec.wire.value()}, spec.planes, matrices, extents[extents.size() - 2],
                          extents.back());
}

// The first edge of a set in [0, size) that is inside a block; -1 if there is none.
Index cut_edge(const IntervalSet& set, Index size, Index block) {
  for (const Interval& interval : set.intervals())
    for (const Index edge : {interval.begin, interval.end})
      if (edge % block != 0 && edge != size) return edge;
  return -1;
}

// Whether a column plane is the transpose of what travels for it: the matrix, or its transpose for the column plane's
// own blocks. MXFP8 stores codes in the order of the matrix, the other formats in the order of its transpose.
bool is_stored_transposed(const QuantSpec& format) {
  return column_is_transposed_row(format) || plane_shape(format, Plane::kColumn, 0, 0).scale_dtype == DType::kF8E8M0;
}

void require_whole_blocks(const TensorSpec& spec, const Layout& layout, Plane plane) {
  const BlockShape block = block_shape({.format = spec.wire.value()}, plane);
  const int columns_dim = static_cast<int>(spec.shape.size()) - 1;
  for (const auto& [dim, length] : {std::pair(columns_dim - 1, block.rows), std::pair(columns_dim, block.columns)}) {
    if (length <= 1) continue;
    const Index size = spec.shape[static_cast<size_t>(dim)];
    for (const IntervalSet& part : partition_dim(layout, size, dim).parts) {
      const Index edge = cut_edge(part, size, length);
      if (edge < 0) continue;
      const Index before = edge / length * length;
      fail(
          ErrorCode::kInvalidArgument,
          "layout {} cuts dim {} of shape {} at {}, inside a block of {} x {} of its {} plane in {}: the nearest edges "
          "between blocks are {} and {}: choose a mesh or bounds (G{}[0;...]) that cut there, or register a tensor of floats"_message,
          layout.to_string(), dim, to_string_shape(spec.shape), edge, block.rows, block.columns, to_string(plane),
          to_string(*spec.wire), before, std::min(before + length, size), dim);
    }
  }
}

}  // namespace

DType require_planes(const TensorSpec& spec, const Layout& layout) {
  if (!spec.wire)
    fail(ErrorCode::kInvalidArgument, "its planes ({}) have no format: name one in TensorSpec::wire"_message,
         to_string(spec.planes));
  if (spec.shape.size() < 2)
    fail(ErrorCode::kInvalidArgument, "shape {} is not that of a matrix, or of a stack of them, which {} needs"_message,
         to_string_shape(spec.shape), to_string(*spec.wire));
  if (!spec.fused.name.empty())
    fail(ErrorCode::kUnimplemented,
         "it is a part of {}, and parts are received dequantised: register planes of a separate tensor"_message,
         spec.fused.name);
  if (!spec.strides.empty())
    fail(ErrorCode::kInvalidArgument,
         "it has strides, and planes of {} lie in one block of memory: leave them out"_message, to_string(*spec.wire));
  const QuantSpec format{.format = *spec.wire};
  for (const Plane plane : {Plane::kRow, Plane::kColumn}) {
    if (!(plane == Plane::kRow ? spec.planes.row : spec.planes.column)) continue;
    plane_shape(format, plane, spec.shape[spec.shape.size() - 2], spec.shape.back());
    require_whole_blocks(spec, layout, plane);
  }
  return plane_shape(format, Plane::kRow, 0, 0).code_dtype;
}

LocalTensor local_planes(const std::string& name, const TensorSpec& spec, Region owned, PlaneSet planes) {
  LocalTensor tensor{.name = name, .dtype = DType::kU8, .array = {}, .data = nullptr, .held = std::move(owned)};
  if (tensor.held.empty()) {
    tensor.array.owned = Region::none(1);
    return tensor;
  }
  const QuantizedLayout layout = layout_of(spec, tensor.held);
  auto* block = static_cast<std::byte*>(spec.data);
  int64_t begin = layout.bytes;
  int64_t end = 0;
  const auto add = [&](const QuantizedLayout::Place& place, bool transposed) {
    tensor.planes.push_back({.transposed = transposed,
                             .codes = block + place.codes,
                             .scales = block + place.scales,
                             .amaxes = needs_amax(*spec.wire) ? block + place.amaxes : nullptr});
    begin = std::min(begin, place.codes);
    end = std::max(end, place.end);
  };
  if (planes.row) add(*layout.row, false);
  if (planes.column) add(*layout.column, is_stored_transposed({.format = *spec.wire}));
  tensor.data = block + begin;
  tensor.array = {.owned = Region::full(Shape{end - begin}), .strides = {1}};
  return tensor;
}

LocalTensor sent_plane(const std::string& name, const TensorSpec& spec, Region owned, Plane plane, Region travels) {
  const bool row = plane == Plane::kRow;
  LocalTensor tensor = local_planes(name, spec, std::move(owned), {.row = row, .column = !row});
  if (tensor.held.empty()) return tensor;
  const QuantizedLayout layout = layout_of(spec, tensor.held);
  const PlaneShape& shape = (row ? *layout.row : *layout.column).shape;
  const PlaneTarget at = std::exchange(tensor.planes, {}).front();
  const Shape extents = std::exchange(tensor.held, {}).extents();
  tensor.encoded = {.transposed = at.transposed, .held = std::move(travels)};
  for (Index m = 0; m < element_count(std::span(extents).first(extents.size() - 2)); ++m)
    tensor.encoded->matrices.push_back(
        {.codes = at.codes + m * shape.code_bytes(),
         .scales = at.scales + m * shape.scale_bytes(),
         .amax = at.amaxes == nullptr ? nullptr : at.amaxes + m * static_cast<Index>(sizeof(float))});
  return tensor;
}

std::optional<PlaneSource> copied_plane(const TensorSpec& spec, const Region& owned, Plane plane, Region travels) {
  const QuantizedCopy& copy = *spec.quantized;
  const QuantSpec format{.format = copy.format};
  const BlockShape block = block_shape(format, plane);
  const int last = owned.ndim() - 1;
  for (const auto& [dim, length] : {std::pair(last - 1, block.rows), std::pair(last, block.columns)})
    if (length > 1 && cut_edge(owned.dim(dim), spec.shape[static_cast<size_t>(dim)], length) >= 0) return std::nullopt;
  const Shape extents = owned.extents();
  const Index matrices = element_count(std::span(extents).first(extents.size() - 2));
  if (std::ssize(copy.matrices) != matrices || std::ranges::count(copy.matrices, nullptr) > 0)
    fail(
        ErrorCode::kInvalidArgument,
        "tensor {}: its quantised copy has {} blocks of memory, and this rank {} matrices: give each matrix one"_message,
        spec.name, copy.matrices.size(), matrices);
  const QuantizedLayout layout = quantized_layout(format, copy.planes, 1, extents[extents.size() - 2], extents.back());
  const QuantizedLayout::Place& place = plane == Plane::kRow ? *layout.row : *layout.column;
  PlaneSource source{.transposed = plane == Plane::kColumn && is_stored_transposed(format), .held = std::move(travels)};
  for (const std::byte* at : copy.matrices)
    source.matrices.push_back({.codes = at + place.codes,
                               .scales = at + place.scales,
                               .amax = needs_amax(copy.format) ? at + place.amaxes : nullptr});
  return source;
}

}  // namespace tessera::bus
