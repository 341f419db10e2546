#include "bus/session/snapshots.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/fail.h"
#include "base/log.h"

namespace tessera::bus {
namespace {

constexpr uint64_t kSlotAlignment = 4096;

}  // namespace

Snapshots::Snapshots(Agent& agent, RunFactory& factory, const Manifest& manifest, std::span<const TensorSpec> tensors,
                     Use use, uint32_t slots, const CallLimits& limits, std::function<void()> done)
    : agent_(agent), factory_(factory), use_(use), done_(std::move(done)), run_done_(agent.loop(), [this] {
        finish();
      }) {
  const Packing packing = pack(manifest, tensors);
  slot_bytes_ = (std::max<uint64_t>(packing.bytes(), 1) + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
  memory_ = factory_.allocate(slots * slot_bytes_, kSlotAlignment);
  specs_ = packing.specs_at(memory_.get());
  current_.assign(slots, std::vector<bool>(specs_.size()));
  note_copies(tensors);
  try {
    make_runs(packing, slots, runs_);
    factory_.await_made(limits.deadline, limits.stop);  // before any peer gets access to the memory
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
  std::byte* const base = memory_.get() + slot * slot_bytes_;
  return use_ == Use::kSend ? packing.routes_in(base) : packing.routes_out(base);
}

void Snapshots::note_copies(std::span<const TensorSpec> tensors) {
  quantized_.clear();
  for (size_t i = 0; i < specs_.size(); ++i) quantized_.push_back(specs_[i].quantized ? tensors[i].quantized : nullptr);
}

void Snapshots::make_runs(const Packing& packing, uint32_t slots, std::vector<std::unique_ptr<Run>>& runs) {
  for (uint32_t slot = 0; slot < slots; ++slot)
    runs.push_back(factory_.make_copy(routes_of(packing, slot), [this] { run_done_.raise(); }));
}

void Snapshots::relocate(const Manifest& manifest, std::span<const TensorSpec> tensors) {
  TESSERA_CHECK(!busy());
  const Packing packing = pack(manifest, tensors);
  const std::vector<TensorSpec> specs = packing.specs_at(memory_.get());
  if (!std::ranges::equal(specs, specs_, {}, &TensorSpec::data, &TensorSpec::data))
    fail(ErrorCode::kInvalidArgument,
         "the moved tensors are not tied as the registered ones were: close the batch and register it again"_message);
  std::vector<std::unique_ptr<Run>> runs;
  make_runs(packing, slots(), runs);
  runs_ = std::move(runs);
  note_copies(tensors);
}

Snapshots::~Snapshots() {
  const Status cleared = agent_.try_on_loop([this] { runs_.clear(); });
  if (!cleared.ok())
    log_event(LogLevel::info, "snapshots.kept", {}, "snapshots of a batch go with its bus: {}", cleared.message());
}

void Snapshots::copy(uint32_t slot) {
  TESSERA_CHECK(!busy());
  for (size_t i = 0; i < quantized_.size(); ++i) current_[slot][i] = quantized_[i] && quantized_[i]->current();
  run_ = runs_[slot].get();
  run_->start(++copies_);
}

void Snapshots::finish() {
  status_ = std::exchange(run_, nullptr)->status();
  done_();
}

}  // namespace tessera::bus
