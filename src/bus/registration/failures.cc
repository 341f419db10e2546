// What a registration hears of ranks that give up, are gone or are stopped, and what it tells of itself.
#include <algorithm>

#include "base/fail.h"
#include "bus/registration/rendezvous.h"

namespace tessera::bus {

// A failure speaks to the registrations that it was built on, whatever their ranks or the failed one do next; and to
// those that have read nothing of it yet, until the failed rank has registered anew.
void Rendezvous::throw_if_failed(const Awaited& side, const StoreView& items) {
  const uint64_t self = speaker_of(own_.incarnation, identity_.job, identity_.rank);
  for (size_t r = 0; r < side.ranks.size(); ++r) {
    const auto rank = static_cast<Rank>(r);
    const auto it = items.find(failure_key(meeting(side.view, side.batch), side.job, rank));
    if (it == items.end()) continue;
    const FailureRecord record = FailureRecord::read(it->first, it->second.value);
    if (record.of.incarnation != side.ranks[r].incarnation || side.speaker(r) == self) continue;
    const auto known = std::ranges::find(record.seen, self, &Seen::speaker);
    if (known != record.seen.end()) {
      if (known->attempt != side.history.attempt) continue;
    } else {
      const std::string key = batch_key(meeting(side.view, side.batch), side.job, rank);
      const auto present = items.find(key);
      const bool anew =
          present != items.end() && record_registration(key, present->second.value).attempt > record.of.attempt;
      if (anew || it->second.mod_revision <= side.history.ended) continue;
    }
    hear(side.view, side.batch, rank_name(side.job, rank), record, it->second.mod_revision).throw_if_error();
  }
}

Status Rendezvous::hear(const PairView& view, const std::string& batch, const std::string& whose,
                        const FailureRecord& record, int64_t revision) {
  const uint64_t self = speaker_of(own_.incarnation, identity_.job, identity_.rank);
  const JobRank who = parse_pair_key("", whose);
  {
    const std::lock_guard lock(mutex_);
    History& history = history_of(view, batch);
    // Those that it speaks to give up what it has read of them. What else this rank has read may stand.
    history.read.clear();
    for (const auto& [speaker, attempt] : record.seen) history.read[speaker] = attempt;
    history.read[speaker_of(record.of.incarnation, who.job, who.rank)] = record.of.attempt;
    history.ended = std::max(history.ended, revision);
    history.heard = true;
    history.over = history.over || history.read.contains(self);  // it has read this attempt, and waits for a newer one
  }
  // Cancelled, or late, is what that rank was, not this one.
  const bool own_affair =
      record.status.code() == ErrorCode::kCancelled || record.status.code() == ErrorCode::kDeadlineExceeded;
  return Status(own_affair ? ErrorCode::kPeerLost : record.status.code(),
                fmt::format("{} gave up: {}", whose, record.status.message()));
}

void Rendezvous::throw_if_gone(const Awaited& side, const std::vector<Rank>& missing, Deadline deadline) const {
  const PairView& view = side.view;
  // In this order: a process that ends as it should takes its records back before.
  std::vector<Rank> dead;
  for (const Rank rank : missing)
    if (liveness_of(side.ranks[static_cast<size_t>(rank)].incarnation) == Liveness::kDead) dead.push_back(rank);
  const std::string failures = pair_failure_prefix(identity_.name_space, view.name);
  StoreView left;
  bool in_order = false;
  try {
    left = store_.range(failures, std::min(deadline.left(), kStorePiece)).items;
    if (!dead.empty()) {
      const std::string key = pair_key(identity_.name_space, view.name, side.job, dead.front());
      in_order = !store_.get(key, std::min(deadline.left(), kStorePiece));
    }
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kDeadlineExceeded && error.code() != ErrorCode::kUnavailable) throw;
    return;  // the store does not answer: who waits says so, and looks again
  }
  const std::string what = fmt::format("pair {}, batch {}", view.name, side.batch);
  for (const Rank rank : missing) {
    const std::string key = failures + rank_name(side.job, rank);
    const auto it = left.find(key);
    if (it == left.end()) continue;
    const FailureRecord record = FailureRecord::read(key, it->second.value);
    if (record.of.incarnation != side.ranks[static_cast<size_t>(rank)].incarnation) continue;
    fail(record.status.code(), "{}: {}", what, record.status.message());
  }
  if (dead.empty()) return;
  fail(ErrorCode::kPeerLost, "{}: {} {} before it had registered", what, rank_name(side.job, dead.front()),
       in_order ? "left" : "died");
}

void Rendezvous::throw_if_stopped(const Awaited& side, const std::vector<Rank>& missing, StopDetectors& detectors) {
  for (const Rank rank : missing) {
    const RankRecord& record = side.ranks[static_cast<size_t>(rank)];
    const Status status = detectors[rank].look(rank_name(side.job, rank), record.incarnation, record.worker);
    if (!status.ok())
      throw Error(status.code(), fmt::format("pair {}, batch {}: {}", side.view.name, side.batch, status.message()));
  }
}

void Rendezvous::report(const PairView& view, const std::string& batch, const Status& status) {
  FailureRecord record{.of = {own_.incarnation, 0}, .status = status, .seen = {}};
  {
    const std::lock_guard lock(mutex_);
    const History& history = history_of(view, batch);
    if (history.heard) return;  // whoever this rank heard it from has told the others, too
    record.of.attempt = history.attempt;
    for (const auto& [speaker, attempt] : history.read) record.seen.push_back({.speaker = speaker, .attempt = attempt});
  }
  // An error is there for those, too, who come to read it after this process has gone.
  const int64_t revision = publish_failure(failure_key(meeting(view, batch), identity_.job, identity_.rank), record,
                                           status.code() != ErrorCode::kCancelled);
  const std::lock_guard lock(mutex_);
  history_of(view, batch).ended = revision;
}

bool Rendezvous::was_told(const PairView& view, const std::string& batch) const {
  const std::lock_guard lock(mutex_);
  const auto it = histories_.find(meeting(view, batch));
  return it != histories_.end() && it->second.heard;
}

}  // namespace tessera::bus
