#include "device/record/recorder.h"

#include <algorithm>
#include <utility>

#include "base/fail.h"

namespace tessera::device {

Recorder::~Recorder() {
  try {
    stop();
  } catch (...) {  // nobody asked for the end of the log
  }
}

void Recorder::set_rank(int rank) {
  const MutexLock lock(mutex_);
  if (on()) fail_internal("the rank of a recorder that is on");
  rank_ = rank;
}

void Recorder::start(RecordSink sink) {
  const MutexLock lock(mutex_);
  if (on()) fail(ErrorCode::kAlreadyExists, "rank {} records its schedule already: stop that first"_message, rank_);
  sink_ = std::move(sink);
  block_ = std::make_unique<RecordBlock>();
  failure_ = nullptr;
  sequence_ = 0;
  started_ = TickMark::now();
  begin_block();
  for (uint32_t actor = 1; actor <= actors_.size(); ++actor) put_actor(actor);
  for (const LocalRegion& region : regions_) put_region(region);
  on_.store(true, std::memory_order_relaxed);
}

void Recorder::stop() {
  const MutexLock lock(mutex_);
  if (!sink_) return;
  on_.store(false, std::memory_order_relaxed);
  if (failure_ == nullptr) pass_on();
  sink_ = nullptr;
  block_.reset();
  if (const std::exception_ptr failure = std::exchange(failure_, nullptr)) std::rethrow_exception(failure);
}

uint32_t Recorder::add_actor(std::string_view name) {
  const MutexLock lock(mutex_);
  actors_.emplace_back(name);
  const auto actor = static_cast<uint32_t>(actors_.size());
  if (on()) put_actor(actor);
  return actor;
}

void Recorder::put_actor(uint32_t actor) {
  if (Entry* const entry = add(RecordKind::kActor, actors_[actor - 1], {})) entry->actor = actor;
}

void Recorder::add_region(const void* local, size_t bytes, RegionId id, std::string_view label) {
  const MutexLock lock(mutex_);
  const auto begin = reinterpret_cast<uintptr_t>(local);
  const auto overlaps = [&](const LocalRegion& other) {
    return other.begin < begin + bytes && begin < other.begin + other.bytes;
  };
  const auto is_same = [&](const LocalRegion& other) {
    return other.begin == begin && other.bytes == bytes && other.id == id;
  };
  for (auto found = std::ranges::find_if(regions_, overlaps); found != regions_.end();
       found = std::ranges::find_if(regions_, overlaps)) {
    if (is_same(*found)) return;
    drop_region_locked(found->begin);
  }
  const auto next = std::ranges::upper_bound(regions_, begin, {}, &LocalRegion::begin);
  const auto added = regions_.insert(next, {.begin = begin, .bytes = bytes, .id = id, .label = std::string(label)});
  if (on()) put_region(*added);
}

void Recorder::drop_region(const void* local) {
  const MutexLock lock(mutex_);
  drop_region_locked(reinterpret_cast<uintptr_t>(local));
}

void Recorder::drop_region_locked(uintptr_t begin) {
  const auto found = std::ranges::lower_bound(regions_, begin, {}, &LocalRegion::begin);
  if (found == regions_.end() || found->begin != begin) return;
  const RegionId id = found->id;
  regions_.erase(found);
  if (!on() || std::ranges::find(regions_, id, &LocalRegion::id) != regions_.end()) return;
  if (Entry* const entry = add(RecordKind::kRegionEnd, {}, {})) {
    entry->number = id.number;
    entry->end = static_cast<uint64_t>(id.owner);
  }
}

void Recorder::put_region(const LocalRegion& region) {
  if (Entry* const entry = add(RecordKind::kRegion, region.label, {})) {
    entry->number = region.id.number;
    entry->begin = region.bytes;
    entry->end = static_cast<uint64_t>(region.id.owner);
  }
}

void Recorder::place(const Access& access, RecordedAccess& recorded) const {
  const auto begin = reinterpret_cast<uintptr_t>(access.data);
  recorded.region = {.owner = rank_};
  recorded.offset = begin;
  recorded.bytes = access.bytes;
  recorded.version = access.version;
  recorded.write = access.write;
  const auto next = std::ranges::upper_bound(regions_, begin, {}, &LocalRegion::begin);
  if (next == regions_.begin()) return;
  const LocalRegion& region = *std::prev(next);
  if (begin - region.begin >= region.bytes) return;
  recorded.region = region.id;
  recorded.offset = begin - region.begin;
}

void Recorder::ran_here(const Operation& operation, std::span<const WaitNotes> waits, uint64_t begin, uint64_t end) {
  std::vector<Access> all;  // if some were known only once it had waited
  for (const WaitNotes& wait : waits) all.insert(all.end(), wait.accesses.begin(), wait.accesses.end());
  if (!all.empty()) all.insert(all.begin(), operation.accesses.begin(), operation.accesses.end());
  const MutexLock lock(mutex_);
  if (!on()) return;
  for (const WaitNotes& wait : waits) add(RecordKind::kWordWait, {}, wait.text, {}, wait.edges);
  if (begin == 0) return;
  if (Entry* const entry =
          add(RecordKind::kOperation, {}, operation.subject, all.empty() ? operation.accesses : all, operation.writes))
    entry->name = operation.name;
  if (end == 0) return;
  if (Entry* const entry = add(RecordKind::kRan, {}, {})) {
    entry->begin = begin;
    entry->end = end;
  }
}

Recorder::Entry* Recorder::add(RecordKind kind, std::string_view name, std::string_view subject,
                               std::span<const Access> accesses, std::span<const WordEdge> words) {
  if (failure_ != nullptr) return nullptr;
  Entry* entry = block_->add(kind, name, subject, accesses.size(), words.size());
  if (entry == nullptr) {
    pass_on();
    if (failure_ != nullptr) return nullptr;
    const size_t bytes = RecordBlock::bytes_for(name, subject, accesses.size(), words.size());
    if (bytes > block_->capacity()) {
      block_ = std::make_unique<RecordBlock>(bytes);
      begin_block();
    }
    entry = block_->add(kind, name, subject, accesses.size(), words.size());
  }
  ++sequence_;
  RecordedAccess* recorded = entry->accesses();
  for (const Access& access : accesses) place(access, *recorded++);
  std::ranges::copy(words, entry->words());
  return entry;
}

void Recorder::begin_block() {
  block_->begin(rank_, sequence_ + 1);
}

void Recorder::pass_on() {
  try {
    block_->set_scale({started_, TickMark::now()});
    block_ = sink_(std::move(block_));
    if (block_ == nullptr) block_ = std::make_unique<RecordBlock>();
    begin_block();
  } catch (...) {
    failure_ = std::current_exception();
    on_.store(false, std::memory_order_relaxed);
  }
}

}  // namespace tessera::device
