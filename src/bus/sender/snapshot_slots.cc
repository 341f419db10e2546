// Staged sends: what is copied, prepared for each job, and then on offer.
#include <algorithm>

#include "base/fail.h"
#include "base/log.h"
#include "base/mutex.h"
#include "bus/sender/sender_batch.h"

namespace tessera::bus {

bool SenderBatch::pinned(uint32_t slot) const {
  if (leases_ && leases_->hold(slot)) return true;
  return std::ranges::any_of(sessions_, [&](const auto& entry) { return entry.second->pinned(slot); });
}

// Not the newest one if another will do: receivers can take that while the next is copied.
std::optional<uint32_t> SenderBatch::free_slot() const {
  std::optional<uint32_t> found;
  for (uint32_t slot = 0; slot < slots_.size(); ++slot) {
    if (pinned(slot)) continue;
    if (slot != newest_slot_ || slots_[slot].version == 0) return slot;
    found = slot;
  }
  return found;
}

void SenderBatch::begin_snapshot() {
  copying_.target = free_slot();
  enter(copying_.target ? "copy" : "wait for a snapshot");
  if (!copying_.target) return;  // on_unpinned() will come
  slots_[*copying_.target] = {};
  for (const auto& [job, session] : sessions_) session->clear(*copying_.target);
  copying_.copied = false;
  present_.data_start = Clock::steady().now();
  copying_.preparing.clear();
  copying_.prepared.clear();
  for (const auto& [job, session] : sessions_)
    if (session->prepares() && !session->broken()) copying_.preparing.insert(session.get());
  snapshots_->copy(*copying_.target);
  for (const auto& [job, session] : sessions_)
    if (copying_.preparing.contains(session.get())) session->prepare(offering_, *copying_.target);
}

void SenderBatch::on_prepared(SenderSession& session, const Status& status) {
  copying_.preparing.erase(&session);
  if (status.ok()) {
    copying_.prepared.insert(&session);
  } else if (!session.broken() && status.code() == ErrorCode::kPeerLost) {
    observe_late(session, status);
  } else if (several() && (ending_.ok() || status.code() == ErrorCode::kDeadlineExceeded)) {
    known_[session.peer_job()].missed = status;
  } else if (!session.broken() && outcome_.failure.ok()) {
    outcome_.failure = status;
  }
  check_snapshot();
}

// No failure of a staged send, which is done whoever takes it: the job does not get the version. A rank of this one had
// sent it before the two met, or has heard first that a rank of that job was lost; or it leaves.
void SenderBatch::observe_late(const SenderSession& session, const Status& why) {
  const LogScope scope = log_scope();
  log_event(LogLevel::info, "job.late", {{"with", session.peer_job()}, {"version", offering_}}, "{}", why.message());
}

void SenderBatch::on_copied() {
  copying_.copied = true;
  if (!snapshots_->status().ok()) outcome_.failure = snapshots_->status();
  for (const auto& [job, session] : sessions_)
    if (copying_.preparing.contains(session.get())) session->copied(snapshots_->status());
  check_snapshot();
}

void SenderBatch::check_snapshot() {
  if (offering_ == 0 || !copying_.preparing.empty() || (copying_.target && !copying_.copied)) return;
  const int64_t version = std::exchange(offering_, 0);
  numbers_.end();
  if (outcome_.failure.ok() && copying_.target) {
    observe_offer(version);
    slots_[*copying_.target] = {.version = version};
    newest_slot_ = *copying_.target;
    version_ = version;
    for (const auto& [job, session] : sessions_)
      if (!session->broken() && (!session->must_prepare() || copying_.prepared.contains(session.get())))
        session->offer_slot(version, *copying_.target);
  }
  copying_.target.reset();
  end_operation(outcome_.failure);
  count_decision();
}

void SenderBatch::on_digested(SenderSession& session, int64_t version) {
  if (version != version_.load()) return;
  session.sum_digests(figures_.sums());
  figures_.keep_sums();
}

void SenderBatch::on_unpinned(SenderSession&) {
  count_decision();
  leave_newcomers();
  begin_waiting_snapshot();
}

void SenderBatch::begin_waiting_snapshot() {
  if (staged() && offering_ != 0 && !copying_.target && ending_.ok()) begin_snapshot();
}

// --- leases --------------------------------------------------------------------------------------

void SenderBatch::on_lease_cut(uint32_t slot, const Incarnation& process) {
  if (!leases_) leases_ = std::make_unique<Leases>(loop(), [this] { begin_waiting_snapshot(); });
  leases_->add(slot, process);
}

void SenderBatch::on_receiver(const Incarnation& process) {
  if (!leases_) return;
  leases_->end(process);
  begin_waiting_snapshot();
}

void SenderBatch::drop_snapshots() {
  if (leases_) leases_->keep(snapshots_->memory());
  leases_.reset();
  BatchImpl::drop_snapshots();
}

}  // namespace tessera::bus
