#include "bus/daemon/worker_memory.h"

#include <algorithm>

#include "memory/host/shared_arena.h"
#include "tessera/memory.h"

namespace tessera::bus {
namespace {

constexpr uint64_t kPage = 4096;

uint32_t number_of(const std::shared_ptr<SharedArena>& arena, std::vector<std::shared_ptr<SharedArena>>& arenas) {
  const auto it = std::ranges::find(arenas, arena);
  if (it != arenas.end()) return static_cast<uint32_t>(it - arenas.begin());
  arenas.push_back(arena);
  return static_cast<uint32_t>(arenas.size() - 1);
}

// The bytes that a tensor takes.
struct Stretch {
  uintptr_t begin = 0, end = 0;
  size_t tensor = 0;
};

// Gives every stretch a separate address, at the same offset in its page as in the worker; overlapping stretches keep
// their distance.
uint64_t place_lent(std::vector<Stretch> stretches, std::span<const LocalTensor> tensors, MemoryPlacement& placement) {
  std::ranges::sort(stretches, {}, &Stretch::begin);
  uint64_t bytes = 0;
  uintptr_t base = 0, end = 0;  // of the current cluster, in the worker's addresses
  uint64_t placed = 0;          // where the cluster begins
  for (const Stretch& stretch : stretches) {
    if (stretch.begin >= end) {
      placed = (bytes + kPage - 1) / kPage * kPage + stretch.begin % kPage;
      base = stretch.begin;
      end = stretch.begin;
    }
    end = std::max(end, stretch.end);
    bytes = placed + (end - base);
    const auto first = reinterpret_cast<uintptr_t>(tensors[stretch.tensor].data);
    placement.tensors[stretch.tensor].place = {.arena = RegisterCall::kLent, .offset = placed + (first - base)};
  }
  return (bytes + kPage - 1) / kPage * kPage;
}

}  // namespace

MemoryPlacement place_tensors(const Manifest& manifest, std::span<const TensorSpec> specs,
                              std::span<const LocalTensor> tensors, bool sends) {
  MemoryPlacement placement;
  std::vector<Stretch> lent;
  for (size_t i = 0; i < specs.size(); ++i) {
    RegisterCall::Tensor& tensor = placement.tensors.emplace_back(RegisterCall::Tensor{.spec = specs[i], .place = {}});
    tensor.spec.data = nullptr;
    tensor.spec.layout = manifest.entries[i].layout;
    if (tensors[i].empty()) continue;
    const ByteExtent extent = tensors[i].extent();
    std::byte* const begin = tensors[i].data + extent.begin;
    const auto bytes = static_cast<size_t>(extent.end - extent.begin);
    const auto found = SharedHeap::process().locate(begin, bytes);
    if (found && (sends || found->arena->writable_elsewhere())) {
      tensor.place = {.arena = number_of(found->arena, placement.arenas),
                      .offset = found->offset + static_cast<uint64_t>(-extent.begin)};
      continue;
    }
    const auto address = reinterpret_cast<uintptr_t>(begin);
    lent.push_back({.begin = address, .end = address + bytes, .tensor = i});
  }
  placement.lent_bytes = place_lent(std::move(lent), tensors, placement);
  return placement;
}

}  // namespace tessera::bus
