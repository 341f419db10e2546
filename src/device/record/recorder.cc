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
  for (uint32_t actor = 1; actor <= actors_.size(); ++actor)
    put_locked({.kind = RecordKind::kActor, .actor = actor, .name = actors_[actor - 1]}, {});
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
  if (on()) put_locked({.kind = RecordKind::kActor, .actor = actor, .name = name}, {});
  return actor;
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
  if (on() && std::ranges::find(regions_, id, &LocalRegion::id) == regions_.end())
    put_locked({.kind = RecordKind::kRegionEnd, .region = id}, {});
}

void Recorder::put_region(const LocalRegion& region) {
  put_locked({.kind = RecordKind::kRegion, .region = region.id, .bytes = region.bytes, .name = region.label}, {});
}

RecordedAccess Recorder::in_region(const Access& access) const {
  const auto begin = reinterpret_cast<uintptr_t>(access.data);
  RecordedAccess recorded{.region = {.owner = rank_},
                          .offset = begin,
                          .bytes = access.bytes,
                          .version = access.version,
                          .write = access.write};
  const auto next = std::ranges::upper_bound(regions_, begin, {}, &LocalRegion::begin);
  if (next == regions_.begin()) return recorded;
  const LocalRegion& region = *std::prev(next);
  if (begin - region.begin >= region.bytes) return recorded;
  recorded.region = region.id;
  recorded.offset = begin - region.begin;
  return recorded;
}

void Recorder::ran_here(std::string_view name, std::string_view subject, std::span<const Access> accesses,
                        std::span<const WordEdge> writes, TimePoint begin, TimePoint end) {
  const MutexLock lock(mutex_);
  if (on()) put_locked({.kind = RecordKind::kOperation, .name = name, .subject = subject, .words = writes}, accesses);
  if (on() && end != TimePoint())
    put_locked(
        {.kind = RecordKind::kRan, .begin = begin.time_since_epoch().count(), .end = end.time_since_epoch().count()},
        {});
}

void Recorder::put(const Record& record, std::span<const Access> accesses) {
  const MutexLock lock(mutex_);
  if (on()) put_locked(record, accesses);
}

void Recorder::put_locked(const Record& record, std::span<const Access> accesses) {
  if (failure_ != nullptr) return;
  RecordBlock::Space space{};
  if (!block_->allot(space, record.name, record.subject, accesses.size(), record.words.size())) {
    pass_on();
    if (failure_ != nullptr) return;
    if (!block_->allot(space, record.name, record.subject, accesses.size(), record.words.size()))
      fail_internal("{} {}: {} accesses and {} words are more than a block holds", record.name, record.subject,
                    accesses.size(), record.words.size());
  }
  space.fill(record);
  space.record->rank = rank_;
  space.record->sequence = ++sequence_;
  std::ranges::transform(accesses, space.accesses,
                         [this](const Access& access) REQUIRES(mutex_) { return in_region(access); });
  std::ranges::copy(record.words, space.words);
}

void Recorder::pass_on() {
  try {
    block_ = sink_(std::move(block_));
    if (block_ == nullptr) block_ = std::make_unique<RecordBlock>();
    block_->clear();
  } catch (...) {
    failure_ = std::current_exception();
    on_.store(false, std::memory_order_relaxed);
  }
}

}  // namespace tessera::device
