#include "bus/session/snapshots.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/fail.h"
#include "memory/host/shared_arena.h"
#include "transport/transport.h"

namespace tessera::bus {
namespace {

constexpr uint64_t kSlotAlignment = 4096;

}  // namespace

Snapshots::Snapshots(Agent& agent, LentMemory* lent, const Manifest& manifest, std::span<const TensorSpec> tensors,
                     Use use, uint32_t slots, const CallLimits& limits, std::function<void()> done)
    : agent_(agent), use_(use), done_(std::move(done)), run_done_(agent.loop(), [this] { finish(); }) {
  const Packing packing = pack(manifest, tensors);
  slot_bytes_ = (std::max<uint64_t>(packing.bytes(), 1) + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
  allocate(slots * slot_bytes_, lent != nullptr);
  specs_ = packing.specs_at(memory_);
  if (lent == nullptr) {
    runs_ = make_runs(packing, slots);
    return;
  }
  try {
    agent_.run_on_loop([&] {
      for (uint32_t slot = 0; slot < slots; ++slot)
        runs_.push_back(lent->make_copy(routes_of(packing, slot), [this] { run_done_.raise(); }));
    });
    lent->sync(limits);  // the worker maps it before any peer is given it: nobody can any more then
  } catch (...) {
    agent_.run_on_loop([this] { runs_.clear(); });
    throw;
  }
}

Packing Snapshots::pack(const Manifest& manifest, std::span<const TensorSpec> tensors) const {
  const Rank rank = agent_.identity().rank;
  std::vector<uint32_t> ties(tensors.size());
  std::iota(ties.begin(), ties.end(), 0u);
  if (use_ == Use::kReceive) ties = find_ties(registered_tensors(manifest, tensors, rank));
  return {manifest, tensors, rank, ties,
          [&](size_t i) { return use_ == Use::kSend && manifest.entries[i].layout.has_partial(); }};
}

std::vector<PullRoute> Snapshots::routes_of(const Packing& packing, uint32_t slot) const {
  std::byte* const base = memory_ + slot * slot_bytes_;
  return use_ == Use::kSend ? packing.routes_in(base) : packing.routes_out(base);
}

std::vector<std::unique_ptr<Run>> Snapshots::make_runs(const Packing& packing, uint32_t slots) {
  const Endpoint self{.process = Incarnation::self(), .name = agent_.identity().name()};
  const std::shared_ptr<const Connection> memory = TransportRegistry::builtin().choose(self, self).connect(self);
  std::vector<std::unique_ptr<Run>> runs;
  for (uint32_t slot = 0; slot < slots; ++slot)
    runs.push_back(
        std::make_unique<PullRun>(std::make_shared<PullProgram>(memory, routes_of(packing, slot),
                                                                PullOptions{.digest = false, .private_access = {}}),
                                  agent_.pull_pool(), [this] { run_done_.raise(); }));
  return runs;
}

void Snapshots::relocate(const Manifest& manifest, std::span<const TensorSpec> tensors) {
  TESSERA_CHECK(!busy() && !arena_);
  const Packing packing = pack(manifest, tensors);
  const std::vector<TensorSpec> specs = packing.specs_at(memory_);
  if (!std::ranges::equal(specs, specs_, {}, &TensorSpec::data, &TensorSpec::data))
    fail(ErrorCode::kInvalidArgument,
         "the moved tensors are not tied as those were that were registered: close the batch and register it again");
  runs_ = make_runs(packing, slots());
}

Snapshots::~Snapshots() {
  agent_.run_on_loop([this] { runs_.clear(); });
}

void Snapshots::allocate(uint64_t bytes, bool lent) {
  if (!lent) {
    buffer_ = SharedHeap::process().allocate(bytes, kSlotAlignment);
    memory_ = buffer_.data();
    return;
  }
  // The heap's own arenas hold other things, too, and may be sealed by now.
  const SharedArena made(0, bytes);
  arena_ = SharedHeap::process().adopt(made.fd_for_agent(), true, agent_.identity().name());
  memory_ = arena_->data();
}

void Snapshots::copy(uint32_t slot) {
  TESSERA_CHECK(!busy());
  run_ = runs_[slot].get();
  run_->start(++copies_);
}

void Snapshots::finish() {
  status_ = std::exchange(run_, nullptr)->status();
  done_();
}

}  // namespace tessera::bus
