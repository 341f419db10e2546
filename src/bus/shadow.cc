#include "bus/shadow.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/fail.h"
#include "bus/packing.h"
#include "device/shared_arena.h"
#include "transport/transport.h"

namespace tessera::bus {
namespace {

constexpr uint64_t kSlotAlignment = 4096;

}  // namespace

Shadow::Shadow(Agent& agent, LentMemory* lent, const Manifest& manifest, std::span<const TensorSpec> tensors, Use use,
               uint32_t slots, const Patience& patience, std::function<void()> done)
    : agent_(agent), done_(std::move(done)), run_done_(agent.loop(), [this] { finish(); }) {
  const Rank rank = agent_.identity().rank;
  std::vector<uint32_t> ties(tensors.size());
  std::iota(ties.begin(), ties.end(), 0u);
  if (use == Use::kReceive) ties = find_ties(registered_tensors(manifest, tensors, rank));
  const Packing packing(manifest, tensors, rank, ties,
                        [&](size_t i) { return use == Use::kSend && manifest.entries[i].layout.has_partial(); });
  slot_bytes_ = (std::max<uint64_t>(packing.bytes(), 1) + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
  allocate(slots * slot_bytes_, lent != nullptr);
  specs_ = packing.specs_at(memory_);

  const auto routes_of = [&](uint32_t slot) {
    std::byte* const base = memory_ + slot * slot_bytes_;
    return use == Use::kSend ? packing.routes_in(base) : packing.routes_out(base);
  };
  const auto run_done = [this] { run_done_.raise(); };
  if (lent != nullptr) {
    try {
      agent_.run_on_loop([&] {
        for (uint32_t slot = 0; slot < slots; ++slot) runs_.push_back(lent->make_copy(routes_of(slot), run_done));
      });
      lent->sync(patience);  // the worker maps it before any peer is given it: nobody can any more then
    } catch (...) {
      agent_.run_on_loop([this] { runs_.clear(); });
      throw;
    }
    return;
  }
  const Endpoint self{.process = Incarnation::self(), .name = agent_.identity().name()};
  const std::shared_ptr<const PeerMemory> memory = TransportRegistry::builtin().choose(self, self).connect(self);
  for (uint32_t slot = 0; slot < slots; ++slot)
    runs_.push_back(std::make_unique<PullRun>(
        std::make_shared<PullProgram>(memory, routes_of(slot), PullOptions{.digest = false, .private_path = {}}),
        agent_.pull_pool(), run_done));
}

Shadow::~Shadow() {
  agent_.run_on_loop([this] { runs_.clear(); });
}

void Shadow::allocate(uint64_t bytes, bool lent) {
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

void Shadow::copy(uint32_t slot) {
  TESSERA_CHECK(!busy());
  run_ = runs_[slot].get();
  run_->start(++copies_);
}

void Shadow::finish() {
  status_ = std::exchange(run_, nullptr)->status();
  done_();
}

}  // namespace tessera::bus
