#include "bus/shadow.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/fail.h"
#include "transport/transport.h"

namespace tessera::bus {
namespace {

constexpr uint64_t kTensorAlignment = 64;
constexpr uint64_t kSlotAlignment = 4096;

uint64_t rounded_up(uint64_t bytes, uint64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

uint64_t bytes_of(const LocalTensor& tensor) {
  const ByteExtent extent = tensor.extent();
  return static_cast<uint64_t>(extent.end - extent.begin);
}

// All of a local tensor, from one place in this process' memory to another.
PullRoute local_copy(uint32_t ordinal, const Shape& shape, const LocalTensor& from, const LocalTensor& to) {
  const ByteExtent extent = from.extent();
  PullRoute route;
  route.what = {.tensor = ordinal, .shape = shape, .dtype = from.dtype, .region = from.array.owned};
  route.src = from.array;
  // By address, shared or not: the loopback transport reads this process' own memory.
  route.memory = {.kind = MemoryDesc::Kind::kPrivate,
                  .arena = 0,
                  .offset = reinterpret_cast<uintptr_t>(from.data + extent.begin),
                  .bytes = static_cast<uint64_t>(extent.end - extent.begin)};
  route.origin = static_cast<uint64_t>(-extent.begin);
  route.dst = to.array;
  route.dst_dtype = to.dtype;
  route.data = to.data;
  return route;
}

}  // namespace

Shadow::Shadow(Agent& agent, const Manifest& manifest, std::span<const TensorSpec> tensors, Use use, uint32_t slots,
               std::function<void()> done)
    : agent_(agent),
      done_(std::move(done)),
      specs_(tensors.begin(), tensors.end()),
      run_done_(agent.loop(), [this] { finish(); }) {
  const Rank rank = agent_.identity().rank;
  const std::vector<LocalTensor> user = registered_tensors(manifest, tensors, rank);
  std::vector<uint32_t> ties(user.size());
  std::iota(ties.begin(), ties.end(), 0u);
  if (use == Use::kReceive) ties = find_ties(user);
  const auto left_out = [&](size_t i) {
    return user[i].empty() || (use == Use::kSend && manifest.entries[i].layout.has_partial());
  };
  // Places first: a size is that of the contiguous tensor, which may differ from what the user's strides span.
  std::vector<uint64_t> offsets(specs_.size(), 0);
  for (size_t i = 0; i < specs_.size(); ++i) {
    if (left_out(i)) continue;
    specs_[i].strides = {};
    const LocalTensor packed = registered_tensors({.entries = {manifest.entries[i]}}, {&specs_[i], 1}, rank).front();
    offsets[i] = ties[i] == i ? slot_bytes_ : offsets[ties[i]];
    if (ties[i] == i) slot_bytes_ += rounded_up(bytes_of(packed), kTensorAlignment);
  }
  slot_bytes_ = rounded_up(std::max<uint64_t>(slot_bytes_, 1), kSlotAlignment);
  memory_ = SharedHeap::process().allocate(slots * slot_bytes_, kSlotAlignment);

  const Endpoint self{.process = Incarnation::self(), .name = agent_.identity().name()};
  const std::shared_ptr<const PeerMemory> memory = TransportRegistry::builtin().choose(self, self).connect(self);
  const auto run_of = [&](std::span<const PullRoute> routes) {
    auto program = std::make_shared<PullProgram>(memory, routes, PullOptions{.digest = false, .private_path = {}});
    return std::make_unique<PullRun>(std::move(program), agent_.pull_pool(), [this] { run_done_.raise(); });
  };
  for (uint32_t slot = slots; slot-- > 0;) {  // the first one last: its places stay
    for (size_t i = 0; i < specs_.size(); ++i)
      if (!left_out(i)) specs_[i].data = memory_.data() + slot * slot_bytes_ + offsets[i];
    const std::vector<LocalTensor> packed = registered_tensors(manifest, specs_, rank);
    std::vector<PullRoute> into, out_of;
    for (uint32_t i = 0; i < specs_.size(); ++i) {
      if (left_out(i) || ties[i] != i) continue;
      into.push_back(local_copy(i, manifest.entries[i].shape, user[i], packed[i]));
      out_of.push_back(local_copy(i, manifest.entries[i].shape, packed[i], user[i]));
    }
    in_.insert(in_.begin(), run_of(into));
    out_.insert(out_.begin(), run_of(out_of));
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
