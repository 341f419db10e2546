#include "bus/session/packing.h"

#include "base/rounding.h"
#include "transport/peer_memory.h"

namespace tessera::bus {
namespace {

uint64_t bytes_of(const LocalTensor& tensor) {
  const ByteExtent extent = tensor.extent();
  return static_cast<uint64_t>(extent.end - extent.begin);
}

// Of one matrix of the quantised copy of what a rank holds.
int64_t matrix_bytes(const QuantizedCopy& copy, const LocalTensor& elements) {
  const Shape extents = elements.array.owned.extents();
  return quantized_layout({.format = copy.format}, copy.planes, 1, extents[extents.size() - 2], extents.back()).bytes;
}

// All of a local tensor, copied from one place in this process's memory to another.
PullRoute local_copy(uint32_t ordinal, const Shape& global, const LocalTensor& from, const LocalTensor& to) {
  const Shape shape = from.planes.empty() ? global : from.array.owned.extents();
  const ByteExtent extent = from.extent();
  PullRoute route;
  route.what = {.tensor = ordinal, .shape = shape, .dtype = from.dtype, .region = from.array.owned};
  route.src = from.array;
  route.memory = own_range(from.data + extent.begin, static_cast<size_t>(extent.end - extent.begin));
  route.origin = static_cast<uint64_t>(-extent.begin);
  route.dst = to.array;
  route.dst_dtype = to.dtype;
  route.data = to.data;
  return route;
}

PullRoute copy_of_bytes(uint32_t ordinal, const std::byte* from, int64_t bytes, std::byte* to) {
  PullRoute route;
  const Shape shape{bytes};
  route.what = {.tensor = ordinal, .shape = shape, .dtype = DType::kU8, .region = Region::full(shape)};
  route.src = route.dst = {.owned = route.what.region, .strides = {1}};
  route.memory = own_range(from, static_cast<size_t>(bytes));
  route.dst_dtype = DType::kU8;
  route.data = to;
  return route;
}

}  // namespace

Packing::Packing(const Manifest& manifest, std::span<const TensorSpec> tensors, Rank rank,
                 std::span<const uint32_t> ties, const std::function<bool(size_t)>& left_out)
    : manifest_(manifest),
      rank_(rank),
      specs_(tensors.begin(), tensors.end()),
      user_(registered_tensors(manifest, tensors, rank)),
      ties_(ties.begin(), ties.end()),
      held_(specs_.size()),
      offsets_(specs_.size(), 0),
      copies_(specs_.size()) {
  for (size_t i = 0; i < specs_.size(); ++i) {
    held_[i] = !user_[i].empty() && !left_out(i);
    if (!held_[i]) continue;
    // The size is the contiguous tensor's, which may differ from what the user's strides span.
    specs_[i].strides = {};
    const LocalTensor packed = registered_tensors({.entries = {manifest.entries[i]}}, {&specs_[i], 1}, rank).front();
    offsets_[i] = ties_[i] == i ? bytes_ : offsets_[ties_[i]];
    if (ties_[i] == i) bytes_ += round_up(bytes_of(packed), kAlignment);
    if (specs_[i].quantized && manifest.entries[i].wire == specs_[i].quantized->format) place_copy(i);
  }
}

void Packing::place_copy(size_t tensor) {
  const QuantizedCopy& copy = *specs_[tensor].quantized;
  for (size_t m = 0; m < copy.matrices.size(); ++m) {
    copies_[tensor].push_back(bytes_);
    bytes_ += round_up(static_cast<uint64_t>(matrix_bytes(copy, user_[tensor])), kAlignment);
  }
}

std::vector<TensorSpec> Packing::specs_at(std::byte* base) const {
  std::vector<TensorSpec> specs = specs_;
  for (size_t i = 0; i < specs.size(); ++i) {
    if (held_[i]) specs[i].data = base + offsets_[i];
    if (!specs[i].quantized) continue;
    QuantizedCopy copy{.format = specs[i].quantized->format, .planes = specs[i].quantized->planes};
    for (const uint64_t offset : copies_[i]) copy.matrices.push_back(base + offset);
    specs[i].quantized = copy.matrices.empty() ? nullptr : std::make_shared<QuantizedCopy>(std::move(copy));
  }
  return specs;
}

std::vector<PullRoute> Packing::routes_in(std::byte* base) const {
  return routes(base, true);
}
std::vector<PullRoute> Packing::routes_out(std::byte* base) const {
  return routes(base, false);
}

std::vector<PullRoute> Packing::routes(std::byte* base, bool in) const {
  const std::vector<LocalTensor> packed = registered_tensors(manifest_, specs_at(base), rank_);
  std::vector<PullRoute> routes;
  for (uint32_t i = 0; i < specs_.size(); ++i) {
    if (held_[i] && ties_[i] == i)
      routes.push_back(local_copy(i, manifest_.entries[i].shape, in ? user_[i] : packed[i], in ? packed[i] : user_[i]));
    for (size_t m = 0; m < copies_[i].size() && in; ++m)
      routes.push_back(copy_of_bytes(i, specs_[i].quantized->matrices[m], matrix_bytes(*specs_[i].quantized, user_[i]),
                                     base + copies_[i][m]));
  }
  return routes;
}

}  // namespace tessera::bus
