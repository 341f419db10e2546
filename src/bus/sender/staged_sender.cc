#include "bus/sender/staged_sender.h"

#include <algorithm>
#include <utility>

#include "base/fail.h"

namespace tessera::bus {

// --- attaching -----------------------------------------------------------------------------------

void StagedSender::open(const PairView& view, const CallLimits& limits) {
  slots_.assign(static_cast<size_t>(setup_.options.snapshots), {});
  SenderBatch::open(view, limits);
}

std::unique_ptr<OfferedVersion> StagedSender::make_offered(SenderSession& session, uint32_t slot) {
  return std::make_unique<OfferedSnapshot>(session, *this, slot);
}

// All that is offered in its sessions was made above.
OfferedSnapshot& StagedSender::offered(SenderSession& session, uint32_t slot) {
  return static_cast<OfferedSnapshot&>(session.offered(slot));
}

void StagedSender::on_attached(SenderSession& session, bool) {
  session.passed(std::max(version_.load(), offering_));
  const int64_t newest = slots_[newest_slot_].version;
  if (newest != 0 && !session.must_prepare()) offered(session, newest_slot_).show_to_receivers(newest);
}

std::vector<std::string> StagedSender::waits_for() const {
  std::vector<std::string> texts = SenderBatch::waits_for();
  if (!copying_.target) texts.push_back(fmt::format("one of {} snapshots that nobody reads"_message, slots_.size()));
  return texts;
}

void StagedSender::check_peers() {
  if (!only_copies()) SenderBatch::check_peers();
}

// --- slots ---------------------------------------------------------------------------------------

bool StagedSender::pinned(uint32_t slot) const {
  if (leases_ && leases_->hold(slot)) return true;
  return std::ranges::any_of(sessions_, [&](const auto& entry) { return entry.second->offered(slot).pinned(); });
}

// Not the newest one if another will do: receivers can take that while the next is copied.
std::optional<uint32_t> StagedSender::free_slot() const {
  std::optional<uint32_t> free;
  for (uint32_t slot = 0; slot < slots_.size(); ++slot) {
    if (pinned(slot)) continue;
    if (slot != newest_slot_ || slots_[slot].version == 0) return slot;
    free = slot;
  }
  return free;
}

void StagedSender::note_begun(int64_t version) {
  for (Slot& slot : slots_)
    if (slot.version == version) slot.begun = true;
}

void StagedSender::on_unpinned() {
  count_decision();
  begin_waiting_send();
}

void StagedSender::begin_waiting_send() {
  if (offering_ != 0 && !copying_.target && ending_.ok()) begin_send();
}

// --- sending -------------------------------------------------------------------------------------

void StagedSender::begin_send() {
  copying_.target = free_slot();
  enter(copying_.target ? "copy" : "wait for a snapshot");
  if (!copying_.target) return;  // on_unpinned() will come
  const uint32_t target = *copying_.target;
  slots_[target] = {};
  for (const auto& [job, session] : sessions_) offered(*session, target).clear();
  copying_.copied = false;
  present_.data_start = Clock::steady().now();
  copying_.preparing.clear();
  copying_.prepared.clear();
  for (const auto& [job, session] : sessions_)
    if (session->prepares() && !session->broken()) copying_.preparing.insert(session.get());
  snapshots_->copy(target);
  for (const auto& [job, session] : sessions_)
    if (copying_.preparing.contains(session.get())) session->offered(target).offer(offering_, false);
}

void StagedSender::on_copied() {
  copying_.copied = true;
  if (!snapshots_->status().ok()) failure_ = snapshots_->status();
  for (const auto& [job, session] : sessions_)
    if (copying_.preparing.contains(session.get())) session->offered(*copying_.target).copied(snapshots_->status());
  check_ended();
}

// A job that is late is no failure of a staged send, which is done whoever takes it: a rank of this job had sent the
// version before the two met, or has heard first that a rank of that job was lost; or it leaves.
void StagedSender::on_prepared(SenderSession& session, const Status& status) {
  copying_.preparing.erase(&session);
  if (status.ok()) {
    copying_.prepared.insert(&session);
  } else if (!session.broken() && status.code() == ErrorCode::kPeerLost) {
    observe_late(session, status);
  } else if (several() && (ending_.ok() || status.code() == ErrorCode::kDeadlineExceeded)) {
    known_[session.peer_job()].missed = status;
  } else if (!session.broken() && failure_.ok()) {
    failure_ = status;
  }
  check_ended();
}

void StagedSender::check_ended() {
  if (offering_ == 0 || !copying_.preparing.empty() || (copying_.target && !copying_.copied)) return;
  const int64_t version = std::exchange(offering_, 0);
  numbers_.end();
  const std::optional<uint32_t> target = std::exchange(copying_.target, std::nullopt);
  if (failure_.ok() && target) {
    observe_offer(version);
    slots_[*target] = {.version = version};
    newest_slot_ = *target;
    version_ = version;
    for (const auto& [job, session] : sessions_)
      if (!session->broken() && (!session->must_prepare() || copying_.prepared.contains(session.get())))
        offered(*session, *target).show_to_receivers(version);
  }
  end_operation(failure_);
  count_decision();
}

void StagedSender::on_digested(SenderSession& session, int64_t version) {
  if (version != version_.load()) return;
  session.sum_digests(figures_.sums());
  figures_.keep_sums();
}

// --- ending early --------------------------------------------------------------------------------

void StagedSender::fall_behind(int64_t version) {
  if (!may_fall_behind(version)) return;
  numbers_.hear(version, true);
  fail_operation(came_too_late(version));
}

SenderBatch::Withdrawal StagedSender::try_withdraw(int64_t version) {
  if (version == 0) return Withdrawal::kTooLate;
  if (version == offering_) {
    if (copying_.target || any_undecided(version)) return Withdrawal::kUndecided;  // until it is copied
    fail_operation(failed(ErrorCode::kCancelled, "version {} was withdrawn"_message, version));
    return Withdrawal::kDone;
  }
  const auto slot = std::ranges::find(slots_, version, &Slot::version);
  if (slot == slots_.end() || slot->begun) return Withdrawal::kTooLate;
  if (any_undecided(version)) return Withdrawal::kUndecided;
  *slot = {};
  for (const auto& [job, session] : sessions_) offered(*session, static_cast<uint32_t>(slot - slots_.begin())).clear();
  return Withdrawal::kDone;
}

// A session that is broken goes on with what its receivers have chosen.
Untaken StagedSender::untaken() const {
  const bool sending = offering_ != 0 && ending_.ok();
  Untaken untaken{.version = sending ? offering_ : slots_[newest_slot_].version};
  for (const auto& [job, session] : sessions_) {
    const auto known = known_.find(job);
    const bool has = known != known_.end() && known->second.version >= untaken.version;
    const bool may_take = sending ? !session->broken() : session->offered(newest_slot_).may_be_taken();
    if (may_take && !has) untaken.jobs.push_back(job);
  }
  return untaken;
}

bool StagedSender::cancel_operation() {
  if (offering_ == 0 || !ending_.ok() || copying_.target) return false;
  observe_withdrawal(offering_);
  fail_operation(failed(ErrorCode::kCancelled, "the send was cancelled"_message));
  return true;
}

void StagedSender::on_deadline() {
  if (offering_ == 0 || only_copies()) return;
  if (!copying_.target)
    return fail_operation(
        failed(ErrorCode::kDeadlineExceeded,
               "{}: {} waited {:.1f} s to send version {}: all {} snapshots are being read: allow more"_message,
               describe(), identity().name(), seconds_waited(), offering_, slots_.size()));
  for (const auto& [job, session] : sessions_) {
    if (!session->offering()) continue;
    ending_ = failed(ErrorCode::kDeadlineExceeded, "waited {:.1f} s: {}"_message, seconds_waited(),
                     session->latest().who_has_not_taken());
    session->fail_offer(ending_);
  }
}

// The sessions bound how long that takes.
void StagedSender::await_readers() {
  const Status why = failed(ErrorCode::kPeerLost, "{} has closed the batch"_message, identity().name());
  setup_.agent->run_on_loop([&] {
    for (const auto& [job, session] : sessions_) session->leave(why);
  });
  while (true) {
    const uint64_t seen = decisions();
    bool idle = false;
    setup_.agent->run_on_loop(
        [&] { idle = std::ranges::all_of(sessions_, [](const auto& entry) { return entry.second->idle(); }); });
    if (idle) return;
    if (await_decision(seen, Deadline::after(kStopPeriod))) continue;
    setup_.agent->run_on_loop([this] { setup_.runs->check(); });
  }
}

// --- leases --------------------------------------------------------------------------------------

void StagedSender::on_lease_cut(uint32_t slot, const Incarnation& process) {
  if (!leases_) leases_ = std::make_unique<Leases>(loop(), [this] { begin_waiting_send(); });
  leases_->add(slot, process);
}

void StagedSender::on_receiver(const Incarnation& process) {
  if (!leases_) return;
  leases_->end(process);
  begin_waiting_send();
}

void StagedSender::drop_snapshots() {
  if (leases_) leases_->keep(snapshots_->memory());
  leases_.reset();
  SenderBatch::drop_snapshots();
}

}  // namespace tessera::bus
