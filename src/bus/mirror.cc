#include "bus/mirror.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include "base/fail.h"
#include "device/shared_arena.h"
#include "tessera/memory.h"
#include "transport/transport.h"

namespace tessera::bus {
namespace {

// For every tensor, the first one that lies as it does (itself if none before it does): names that share storage and
// layout, which are sent once.
std::vector<uint32_t> find_same(std::span<const LocalTensor> tensors) {
  std::map<std::tuple<const std::byte*, DType, std::vector<Index>, std::vector<Index>>, uint32_t> seen;
  std::vector<uint32_t> same(tensors.size());
  for (uint32_t i = 0; i < tensors.size(); ++i) {
    const LocalTensor& tensor = tensors[i];
    same[i] = seen.try_emplace({tensor.data, tensor.dtype, tensor.array.owned.extents(), tensor.array.strides}, i)
                  .first->second;
  }
  return same;
}

}  // namespace

Mirror::Mirror(const Identity& identity, const Manifest& manifest, std::span<const TensorSpec> tensors, bool sends,
               int threads) {
  const std::vector<LocalTensor> user = registered_tensors(manifest, tensors, identity.rank);
  const std::vector<uint32_t> ties = sends ? find_same(user) : find_ties(user);
  for (size_t i = 0; i < tensors.size(); ++i) {
    RegisterCall::Tensor& tensor = tensors_.emplace_back(RegisterCall::Tensor{.spec = tensors[i], .place = {}});
    tensor.spec.data = nullptr;
    tensor.spec.layout = manifest.entries[i].layout;
    if (user[i].empty()) continue;
    const ByteExtent extent = user[i].extent();
    const auto found =
        SharedHeap::process().locate(user[i].data + extent.begin, static_cast<size_t>(extent.end - extent.begin));
    if (!found || (!sends && !found->arena->writable_elsewhere())) continue;
    tensor.place = {.arena = number_of(found->arena), .offset = found->offset + static_cast<uint64_t>(-extent.begin)};
  }

  const Packing packing(manifest, tensors, identity.rank, ties,
                        [&](size_t i) { return tensors_[i].place.has_value(); });
  copied_bytes_ = packing.bytes();
  if (copied_bytes_ == 0) return;
  // An arena of its own, so that no peer is ever given one that is to be written.
  const auto arena = std::make_shared<SharedArena>(0, copied_bytes_);
  const uint32_t number = number_of(arena);
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (!packing.holds(i)) continue;
    tensors_[i].spec.strides = {};
    tensors_[i].place = {.arena = number, .offset = packing.offset(i)};
  }
  const Endpoint self{.process = Incarnation::self(), .name = identity.name()};
  const std::shared_ptr<const PeerMemory> memory = TransportRegistry::builtin().choose(self, self).connect(self);
  pool_ = std::make_unique<WorkerPool>(threads, "tessera-mirror");
  const auto run_of = [&](std::span<const PullRoute> routes) {
    auto program = std::make_shared<PullProgram>(memory, routes, PullOptions{.digest = false, .private_path = {}});
    return std::make_unique<PullRun>(std::move(program), *pool_, [this] {
      const std::lock_guard lock(mutex_);
      running_ = false;
      ended_.notify_all();
    });
  };
  if (sends)
    in_ = run_of(packing.routes_in(arena->data()));
  else
    out_ = run_of(packing.routes_out(arena->data()));
}

Mirror::~Mirror() = default;

uint32_t Mirror::number_of(const std::shared_ptr<SharedArena>& arena) {
  const auto it = std::ranges::find(arenas_, arena);
  if (it != arenas_.end()) return static_cast<uint32_t>(it - arenas_.begin());
  arenas_.push_back(arena);
  return static_cast<uint32_t>(arenas_.size() - 1);
}

void Mirror::copy_in() {
  run(in_.get());
}
void Mirror::copy_out() {
  run(out_.get());
}

void Mirror::run(PullRun* copies) {
  if (copies == nullptr) return;
  std::unique_lock lock(mutex_);
  running_ = true;
  lock.unlock();
  copies->start(++copies_);
  lock.lock();
  ended_.wait(lock, [&] { return !running_; });  // a copy within this process: it ends
  lock.unlock();
  copies->status().throw_if_error();
}

}  // namespace tessera::bus
