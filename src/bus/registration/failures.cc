// How a registration notices ranks that give up, are gone or are stopped, and how it reports its own failure.
#include <algorithm>

#include "base/fail.h"
#include "bus/registration/batch_exchange.h"

namespace tessera::bus {

// A failure is for the registrations that it was built on, whatever their ranks or the failed one do next, and for
// those that have not read anything of it yet, until the failed rank has registered again. A deadline of the other
// job's is that job's own: it may call again.
void BatchExchange::throw_if_failed(const Awaited& side, const StoreView& items) {
  const std::string failures = failure_prefix(records_, side.job);
  if (const auto first = items.lower_bound(failures); first == items.end() || !first->first.starts_with(failures))
    return;  // nearly always
  const uint64_t self = speaker();
  for (size_t r = 0; r < side.ranks.size(); ++r) {
    const auto rank = static_cast<Rank>(r);
    const auto it = items.find(failure_key(records_, side.job, rank));
    if (it == items.end()) continue;
    const FailureRecord record = read_record<FailureRecord>(it->first, it->second.value);
    if (record.of.incarnation != side.ranks[r].incarnation || side.speaker(r) == self) continue;
    if (is_others_deadline(side.job, record)) continue;
    const auto known = std::ranges::find(record.seen, self, &Seen::speaker);
    if (known != record.seen.end()) {
      if (known->attempt != side.history.attempt) continue;
    } else if (record.only_seen) {
      continue;
    } else {
      const auto again = [&](const std::string& key) {
        const auto present = items.find(key);
        return present != items.end() && record_registration(key, present->second.value).attempt > record.of.attempt;
      };
      if (again(batch_key(records_, side.job, rank)) || again(gathered_key(records_, side.job, rank)) ||
          it->second.mod_revision <= side.history.ended)
        continue;
    }
    fail_attempt(rank_name(side.job, rank), record, it->second.mod_revision).throw_if_error();
  }
}

bool BatchExchange::is_others_deadline(const std::string& job, const FailureRecord& record) const {
  return job != identity().job && record.status.code() == ErrorCode::kDeadlineExceeded;
}

Status BatchExchange::fail_attempt(const std::string& whose, const FailureRecord& record, int64_t revision) {
  const JobRank who = parse_pair_key("", whose);
  {
    const MutexLock lock(mutex_);
    // The registrations that the failure is for discard what they have read of it. Other records that this rank has
    // read stay valid.
    history_.read.clear();
    for (const auto& [speaker, attempt] : record.seen) history_.read[speaker] = attempt;
    history_.read[speaker_of(record.of.incarnation, who.job, who.rank)] = record.of.attempt;
    history_.ended = std::max(history_.ended, revision);
    history_.failed = true;
    history_.over = history_.over || history_.read.contains(speaker());  // it has read this attempt: a newer one is due
  }
  // If that rank was cancelled or late, this one was not.
  const bool own_affair =
      record.status.code() == ErrorCode::kCancelled || record.status.code() == ErrorCode::kDeadlineExceeded;
  return Status(own_affair ? ErrorCode::kPeerLost : record.status.code(),
                fmt::format("{} gave up: {}"_message, whose, record.status.message()));
}

bool BatchExchange::throw_if_gone(std::span<const Missing> missing, Deadline deadline, std::unique_ptr<Watch>& failures,
                                  const std::function<void()>& ring) {
  // In this order: a process that ends normally removes its records first.
  std::optional<JobRank> dead;
  for (const auto& [side, ranks] : missing)
    for (const Rank rank : ranks)
      if (!dead && liveness_of(side.ranks[static_cast<size_t>(rank)].incarnation) == Liveness::kDead)
        dead = JobRank{side.job, rank};
  const std::string prefix = pair_failure_prefix(identity().name_space, pair_);
  StoreView left;
  bool in_order = false;
  try {
    StoreRange range = store_.range(prefix, std::min(deadline.left(), kStorePiece));
    failures = store_.watch(prefix, range.revision + 1, [ring](const WatchUpdate&) { ring(); });
    left = std::move(range.items);
    if (dead) {
      const std::string key = pair_key(identity().name_space, pair_, dead->job, dead->rank);
      in_order = !store_.get(key, std::min(deadline.left(), kStorePiece));
    }
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kDeadlineExceeded && error.code() != ErrorCode::kUnavailable) throw;
    return false;  // the waiter reports this, and tries again
  }
  const std::string what = describe();
  const uint64_t self = speaker();
  for (const auto& [side, ranks] : missing) {
    for (const Rank rank : ranks) {
      const auto it = left.find(prefix + rank_name(side.job, rank));
      if (it == left.end()) continue;
      const FailureRecord record = read_record<FailureRecord>(it->first, it->second.value);
      if (record.of.incarnation != side.ranks[static_cast<size_t>(rank)].incarnation) continue;
      if (record.only_seen && std::ranges::find(record.seen, self, &Seen::speaker) == record.seen.end()) continue;
      note_gone();
      fail(record.status.code(), "{}: {}"_message, what, record.status.message());
    }
  }
  if (!dead) return true;
  note_gone();
  fail(ErrorCode::kPeerLost, "{}: {} {} before it had registered"_message, what, rank_name(dead->job, dead->rank),
       in_order ? "left" : "died");
}

void BatchExchange::note_gone() {
  const MutexLock lock(mutex_);
  history_.gone = true;
}

void BatchExchange::throw_if_stopped(const PeerWatch& processes, const std::vector<Rank>& missing) const {
  for (const Rank rank : missing) {
    const Status status = processes.stopped(static_cast<size_t>(rank));
    if (!status.ok()) throw Error(status.code(), fmt::format("{}: {}", describe(), status.message()));
  }
}

void BatchExchange::report(const Status& status) {
  FailureRecord record{.of = {rendezvous_.own().incarnation, 0}, .status = status, .seen = {}};
  {
    const MutexLock lock(mutex_);
    if (history_.failed) return;  // the rank that this one heard it from has told the others, too
    record.of.attempt = history_.attempt;
    for (const auto& [speaker, attempt] : history_.read)
      record.seen.push_back({.speaker = speaker, .attempt = attempt});
    record.only_seen = history_.gone;  // others see for themselves who has gone, or meet who has come instead
  }
  // The message remains for ranks that read it after this process has gone.
  const int64_t revision = rendezvous_.publish_failure(failure_key(records_, identity().job, identity().rank), record,
                                                       status.code() != ErrorCode::kCancelled);
  const MutexLock lock(mutex_);
  history_.ended = revision;
}

bool BatchExchange::other_failed() const {
  const MutexLock lock(mutex_);
  return history_.failed;
}

}  // namespace tessera::bus
