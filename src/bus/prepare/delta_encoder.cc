#include "bus/prepare/delta_encoder.h"

#include <algorithm>
#include <utility>

#include "base/fail.h"
#include "base/fail_point.h"
#include "base/log.h"
#include "base/rounding.h"

namespace tessera::bus {
DeltaEncoder::DeltaEncoder(Agent& agent, const SessionSetup& setup, const SourceOf& source_of, Compared compared)
    : setup_(setup),
      compared_(std::move(compared)),
      part_of_(setup.routes.sent.size(), kNone),
      done_(agent.loop(), [this] { finish(); }),
      slots_(setup.slots) {
  std::vector<std::vector<const std::byte*>> sources(setup.slots);
  collect_parts(source_of, sources);
  bases_ = SharedHeap::process().allocate(std::max<uint64_t>(base_bytes_, 1), static_cast<size_t>(kDeltaAlignment));
  pieces_ = std::make_unique<SparseMemory>(setup.slots * slot_bytes_, agent.identity().name());
  for (uint32_t slot = 0; slot < setup.slots; ++slot) {
    std::vector<DeltaRun::Memory> memory;
    for (size_t p = 0; p < parts_.size(); ++p)
      memory.push_back({sources[slot][p], bases_.data() + parts_[p].base, slot * slot_bytes_ + parts_[p].piece});
    slots_[slot].run = setup_.runs->make_comparison(program_, std::move(memory), *pieces_, [this] { done_.raise(); });
  }
}

DeltaEncoder::~DeltaEncoder() {
  TESSERA_CHECK(!busy());
}

void DeltaEncoder::collect_parts(const SourceOf& source_of, std::vector<std::vector<const std::byte*>>& sources) {
  std::vector<DeltaRoute> routes;
  for (uint32_t sent = 0; sent < setup_.routes.sent.size(); ++sent) {
    const SentRoute& route = setup_.routes.sent[sent];
    const Match::Tensor& matched = setup_.agreement.match.tensors[route.tensor];
    if (matched.wire) continue;
    const SourceRoute source = source_of(route, 0);
    const bool cast = matched.src_dtype != matched.dst_dtype;
    part_of_[sent] = static_cast<uint32_t>(parts_.size());
    parts_.push_back({.sent = sent, .cast = cast, .base = 0, .piece = 0});
    routes.push_back({.what = source.what, .src = source.src, .cast = cast});
    for (uint32_t slot = 0; slot < setup_.slots; ++slot) sources[slot].push_back(source_of(route, slot).data);
  }
  program_ = std::make_shared<DeltaProgram>(routes, setup_.agreement.digest);
  for (size_t p = 0; p < parts_.size(); ++p) {
    parts_[p].base = base_bytes_;
    parts_[p].piece = slot_bytes_;
    base_bytes_ += static_cast<uint64_t>(round_up(program_->piece(p).full_bytes(), kDeltaAlignment));
    slot_bytes_ += static_cast<uint64_t>(round_up(program_->piece(p).bytes(), kDeltaAlignment));
  }
}

void DeltaEncoder::place(uint32_t sent, ServedRoute& served) const {
  const Part& part = parts_[part_of_[sent]];
  served.delta = pieces_->data() + part.piece;
  served.delta_bytes = static_cast<size_t>(program_->piece(part_of_[sent]).bytes());
  served.delta_slot_bytes = setup_.slots > 1 ? slot_bytes_ : 0;
  served.delta_digest = part.cast;
  served.per_route = true;
  if (setup_.slots > 1 || setup_.routes.sent[sent].reduction != SentRoute::kNone) return;
  const RouteRegion& what = served.route.what;
  served.route.src = {.owned = what.region, .strides = byte_strides(what.dtype, what.region.extents())};
  served.route.data = bases_.data() + part.base;
}

int64_t DeltaEncoder::delta_bytes(uint32_t sent, uint32_t slot) const {
  static_assert(DeltaRun::kFull == Grant::kInFull);
  return covers(sent) && slots_[slot].base != 0 ? slots_[slot].run->bytes_of(part_of_[sent]) : Grant::kInFull;
}

const Digest& DeltaEncoder::digest(uint32_t sent, uint32_t slot) const {
  return slots_[slot].run->digests()[part_of_[sent]];
}

const Digest& DeltaEncoder::piece_digest(uint32_t sent, uint32_t slot) const {
  return slots_[slot].run->piece_digest(part_of_[sent]);
}

// --- a version -----------------------------------------------------------------------------------

void DeltaEncoder::start(int64_t /*version*/, uint32_t slot) {
  TESSERA_CHECK(!busy());
  busy_ = true;
  slot_ = slot;
  slots_[slot].stamp = 0;
  slots_[slot].base = std::exchange(base_stamp_, 0);  // from here on the copy is being written
  slots_[slot].run->compare(slots_[slot].base != 0);
  slots_[slot].run->start(++epoch_);
  fail_point("delta: comparing");
}

void DeltaEncoder::abort(const Status& status) {
  if (busy_) slots_[slot_].run->abort(status);
}

std::string DeltaEncoder::awaited(int64_t version) const {
  return fmt::format("version {} to be compared with the last one"_message, version);
}

void DeltaEncoder::finish() {
  fail_point("delta: compared");
  busy_ = false;
  Slot& slot = slots_[slot_];
  const Status status = slot.run->status();
  if (status.ok()) {
    slot.stamp = base_stamp_ = ++last_stamp_;
    count_fruitless(slot);
  } else {
    slot.base = 0;
  }
  compared_(status);
}

void DeltaEncoder::count_fruitless(const Slot& slot) {
  if (slot.base == 0 || parts_.empty()) return;
  for (size_t p = 0; p < parts_.size(); ++p)
    if (slot.run->bytes_of(p) != DeltaRun::kFull) {
      fruitless_ = 0;
      return;
    }
  if (++fruitless_ != kFruitless) return;
  log_event(LogLevel::warn, "delta.fruitless", {{"with", setup_.view.peer_job}},
            "batch {} of pair {}: in {} versions no delta was smaller than the data itself: without deltas they would "
            "come sooner, and take less memory"_message,
            setup_.batch, setup_.view.name, kFruitless);
}

}  // namespace tessera::bus
