#include "tools/held_tensors.h"

#include <algorithm>
#include <utility>

#include "base/fail.h"
#include "checkpoint/shown.h"
#include "codec/simd/reduce.h"
#include "layout/job_ranks.h"

namespace tessera::tools {
namespace {

constexpr size_t kAlignment = 64;

void check_ranks(const TensorInfo& info, const Layout& layout, int world) {
  try {
    require_ranks_of_job(layout, world);
  } catch (const Error& error) {
    fail(error.code(), "tensor {}: {}"_message, checkpoint::shown(info.name), error.what());
  }
}

// Checked on every rank, whether or not it holds terms: if only one refused, the others would wait for it.
void check_terms(const TensorInfo& info, const Layout& layout) {
  if (const auto op = layout.partial_op(); op && !reducible(*op, info.dtype))
    fail(ErrorCode::kInvalidArgument, "tensor {}: its layout {}: {} cannot be reduced by {}"_message,
         checkpoint::shown(info.name), layout.to_string(), to_string(info.dtype), to_string(*op));
}

size_t packed_bytes(const TensorInfo& info, const Region& region) {
  if (region.size() * bits_of(info.dtype) % 8 != 0)
    fail(ErrorCode::kInvalidArgument,
         "tensor {}: the slice {} of {} would be cut inside a byte: choose even bounds"_message,
         checkpoint::shown(info.name), region.to_string(), to_string(info.dtype));
  return static_cast<size_t>(bytes_of(info.dtype, region.size()));
}

}  // namespace

HeldTensors::HeldTensors(std::vector<TensorInfo> tensors, std::vector<Layout> layouts, Rank rank, int world)
    : rank_(rank) {
  TESSERA_CHECK_EQ(tensors.size(), layouts.size());
  size_t end = 0;
  std::vector<std::pair<size_t, size_t>> places;  // offset and bytes of each
  tensors_.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    check_ranks(tensors[i], layouts[i], world);
    check_terms(tensors[i], layouts[i]);
    const bool member = layouts[i].mesh().position_of(rank).has_value();
    Region region = layouts[i].owned(tensors[i].shape, rank);
    const size_t bytes = packed_bytes(tensors[i], region);
    places.emplace_back(end, bytes);
    end = (end + bytes + kAlignment - 1) / kAlignment * kAlignment;
    bytes_ += static_cast<int64_t>(bytes);
    tensors_.push_back({std::move(tensors[i]), std::move(layouts[i]), member, std::move(region), {}});
  }
  block_ = SharedHeap::process().allocate(std::max(end, kAlignment), kAlignment);
  for (size_t i = 0; i < tensors_.size(); ++i)
    if (tensors_[i].member) tensors_[i].memory = {block_.data() + places[i].first, places[i].second};
}

std::vector<TensorSpec> HeldTensors::specs(const WireRules& wires) const {
  std::vector<TensorSpec> specs;
  specs.reserve(tensors_.size());
  for (const HeldTensor& tensor : tensors_) {
    TensorSpec& spec = specs.emplace_back();
    spec.name = tensor.info.name;
    spec.data = tensor.memory.data();
    spec.dtype = tensor.info.dtype;
    spec.shape = tensor.info.shape;
    spec.layout = tensor.layout;
    spec.wire = wires.find(tensor.info.name);
  }
  return specs;
}

}  // namespace tessera::tools
