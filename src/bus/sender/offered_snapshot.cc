#include "bus/sender/offered_snapshot.h"

#include "base/log.h"
#include "bus/sender/sender_session.h"
#include "bus/sender/staged_sender.h"

namespace tessera::bus {

void OfferedSnapshot::show_to_receivers(int64_t version) {
  version_ = version;
  const Preparation& preparation = session_.preparation();
  if (show() && (preparation.quantizer() || preparation.deltas())) sender_.on_digested(session_, version);
}

void OfferedSnapshot::clear() {
  if (on_offer()) withdraw();
  state_ = State::kNone;
}

// A session that is broken brings no more versions, but the one that its receivers have chosen already.
bool OfferedSnapshot::may_be_taken() const {
  return on_offer() && (!session_.broken() || session_.held(version_));
}

bool OfferedSnapshot::awaits(const SourceLink& receiver) const {
  return session_.held(version()) && receiver.ended_version() != version_;
}

void OfferedSnapshot::on_prepared() {
  session_.check_ended();
}

void OfferedSnapshot::on_not_taken(const SourceLink& receiver, const Status& status) {
  const LogScope scope = session_.log_scope();
  log_event(LogLevel::info, "version.not_taken", {{"peer", receiver.name()}, {"version", version_}},
            "{} does not take version {}: {}"_message, receiver.name(), version_, status.message());
}

void OfferedSnapshot::on_digests() {
  if (session_.digests().ready(slot_)) sender_.on_digested(session_, version());
  session_.note_unpinned();
}

void OfferedSnapshot::on_lease_cut(const Incarnation& process) {
  sender_.on_lease_cut(slot_, process);
}

// Receivers may go on with what they have chosen; they choose nothing any more.
void OfferedSnapshot::on_broken(const Status& latest) {
  fail(latest);
  session_.check_taken();
  if (on_offer() && !session_.held(version_)) withdraw();
  if (!session_.idle()) session_.bound_reading(session_.setup().stall);
}

void OfferedSnapshot::on_leaving(const Status& why) {
  clear();
  session_.digests().abort(slot_, why);
}

void OfferedSnapshot::check_ended() {
  if (!under_way()) return;
  // A thread that fills a stream with terms may still have to say so when its owner has drained it.
  const bool read = session_.terms().reading() || (preparing() && !session_.terms().all_ended(version_));
  const bool prepared = failing() || session_.preparation().complete();
  if (read || !prepared || session_.preparation().busy()) return;
  const Status status = failing() ? failure_ : Status();
  state_ = failing() ? State::kNone : State::kPrepared;
  session_.end_reading();
  sender_.on_prepared(session_, status);
}

}  // namespace tessera::bus
