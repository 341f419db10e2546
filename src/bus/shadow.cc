#include "bus/shadow.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/fail.h"
#include "bus/packing.h"
#include "transport/transport.h"

namespace tessera::bus {
namespace {

constexpr uint64_t kSlotAlignment = 4096;

}  // namespace

Shadow::Shadow(Agent& agent, const Manifest& manifest, std::span<const TensorSpec> tensors, Use use, uint32_t slots,
               std::function<void()> done)
    : agent_(agent), done_(std::move(done)), run_done_(agent.loop(), [this] { finish(); }) {
  const Rank rank = agent_.identity().rank;
  std::vector<uint32_t> ties(tensors.size());
  std::iota(ties.begin(), ties.end(), 0u);
  if (use == Use::kReceive) ties = find_ties(registered_tensors(manifest, tensors, rank));
  const Packing packing(manifest, tensors, rank, ties,
                        [&](size_t i) { return use == Use::kSend && manifest.entries[i].layout.has_partial(); });
  slot_bytes_ = (std::max<uint64_t>(packing.bytes(), 1) + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
  memory_ = SharedHeap::process().allocate(slots * slot_bytes_, kSlotAlignment);
  specs_ = packing.specs_at(memory_.data());

  const Endpoint self{.process = Incarnation::self(), .name = agent_.identity().name()};
  const std::shared_ptr<const PeerMemory> memory = TransportRegistry::builtin().choose(self, self).connect(self);
  const auto run_of = [&](std::span<const PullRoute> routes) {
    auto program = std::make_shared<PullProgram>(memory, routes, PullOptions{.digest = false, .private_path = {}});
    return std::make_unique<PullRun>(std::move(program), agent_.pull_pool(), [this] { run_done_.raise(); });
  };
  for (uint32_t slot = 0; slot < slots; ++slot) {
    std::byte* const base = memory_.data() + slot * slot_bytes_;
    in_.push_back(run_of(packing.routes_in(base)));
    out_.push_back(run_of(packing.routes_out(base)));
  }
}

void Shadow::copy_in(uint32_t slot) {
  start(*in_[slot]);
}

void Shadow::copy_out(uint32_t slot) {
  start(*out_[slot]);
}

void Shadow::start(PullRun& run) {
  TESSERA_CHECK(!busy());
  run_ = &run;
  run.start(++copies_);
}

void Shadow::finish() {
  status_ = std::exchange(run_, nullptr)->status();
  done_();
}

}  // namespace tessera::bus
