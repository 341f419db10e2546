// The jobs that receive: what is known of each, and how long a send waits for them.
#include <algorithm>

#include "base/fail.h"
#include "base/mutex.h"
#include "bus/sender/sender_batch.h"

namespace tessera::bus {

// --- what is known of them -----------------------------------------------------------------------

void SenderBatch::note_absence(const SenderSession& session) {
  if (session.renewed()) return;
  known_[session.peer_job()].absence = session.broken_status();
  if (!several() && reported_ != &session && !session.left()) unreported_ = session.broken_status();
}

void SenderBatch::on_not_met(const std::string& job, const Status& why) {
  known_[job].absence = why;
}

void SenderBatch::on_taken(SenderSession& session, int64_t version) {
  Known& known = known_[session.peer_job()];
  known.version = std::max(known.version, version);
  known.missed = {};
  count_decision();
}

void SenderBatch::describe_peer(BatchPeer& peer) const {
  const auto it = known_.find(peer.job);
  if (it == known_.end()) return;
  const Known& known = it->second;
  peer.version = known.version;
  peer.world = known.world;
  if (!peer.attached && peer.error.ok()) peer.error = known.absence;
  if (peer.error.ok()) peer.error = known.missed;
}

// "job engine0; job engine1: engine1/0 has died"; those that have not taken `version`, or are not attached.
std::string SenderBatch::who_is_missing(int64_t version) const {
  std::string text;
  for (const auto& meeting : meetings_) {
    BatchPeer peer{.job = meeting->job(), .attached = attached(meeting->job())};
    describe_peer(peer);
    if (version != 0 ? peer.version >= version : peer.attached) continue;
    text += fmt::format("{}job {}{}{}", text.empty() ? "" : "; ", peer.job, peer.error.ok() ? "" : ": ",
                        peer.error.message());
  }
  return text;
}

bool SenderBatch::attached(const std::string& job) const {
  const auto it = sessions_.find(job);
  return it != sessions_.end() && !it->second->broken();
}

void SenderBatch::wait_peers(int jobs, int64_t version, Timeout timeout) {
  process_.require(identity().name());
  const Deadline deadline = Deadline::after(timeout);
  const std::stop_token stop = setup_.interruption->token();
  while (true) {
    uint64_t seen = 0;
    {
      const MutexLock lock(mutex_);
      seen = decisions_;
    }
    std::string missing;
    int64_t found = 0;
    setup_.agent->run_on_loop([&] {
      if (closed_) fail(ErrorCode::kCancelled, "{}: {} has closed it"_message, describe(), identity().name());
      found = version != 0
                  ? std::ranges::count_if(known_, [&](const auto& entry) { return entry.second.version >= version; })
                  : std::ranges::count_if(sessions_, [&](const auto& entry) { return attached(entry.first); });
      missing = who_is_missing(version);
    });
    if (found >= jobs) return;
    const MutexLock lock(mutex_);
    const auto changed = [&]() REQUIRES(mutex_) { return decisions_ != seen || ended_; };
    if (changed_.wait_until(mutex_, stop, deadline, changed)) continue;
    const std::string what =
        version != 0 ? fmt::format("{} jobs to take version {}", jobs, version) : fmt::format("{} jobs", jobs);
    if (stop.stop_requested())
      fail(ErrorCode::kCancelled, "{}: the wait of {} for {} was interrupted; missing: {}"_message, describe(),
           identity().name(), what, missing);
    fail(ErrorCode::kDeadlineExceeded, "{}: {} waited {:.1f} s for {}: {} so far; missing: {}"_message, describe(),
         identity().name(), to_seconds(timeout), what, found, missing);
  }
}

Status SenderBatch::nobody_attached() const {
  const std::string text = who_is_missing(0);
  ErrorCode code = ErrorCode::kDeadlineExceeded;
  for (const auto& [job, known] : known_)
    if (!several() && !known.absence.ok()) code = known.absence.code();
  return failed(code, "{}: {} waited {:.1f} s to send version {}, and no job is attached{}{}"_message, describe(),
                identity().name(), to_seconds(Clock::steady().now() - present_.start), offering_,
                text.empty() ? "" : ": ", text);
}

// --- waiting for them ----------------------------------------------------------------------------

void SenderBatch::begin_grace() {
  outcome_.grace = loop().add_timer_after(setup_.options.grace, [this] { end_grace(); });
}

// Who has not begun is waited for no longer.
void SenderBatch::end_grace() {
  outcome_.grace = 0;
  for (const auto& [job, session] : sessions_)
    if (session->offering() && !session->begun(offering_)) newcomers_.insert(session.get());
  check_ended();
}

void SenderBatch::leave_newcomers() {
  const auto at_it = [&](const auto& entry) {
    return entry.second->offering() && !newcomers_.contains(entry.second.get());
  };
  if (offering_ == 0 || !ending_.ok() || !outcome_.taken || std::ranges::any_of(sessions_, at_it)) return;
  for (const auto& [job, session] : sessions_)
    if (session->offering() && !session->undecided(offering_))
      session->fail_offer(
          failed(ErrorCode::kCancelled, "all others have it, and {}"_message, session->who_has_not_taken()));
}

}  // namespace tessera::bus
