#include "bus/sender/offered_in_place.h"

#include <fmt/format.h>

#include <algorithm>

#include "bus/sender/in_place_sender.h"
#include "bus/sender/sender_session.h"

namespace tessera::bus {

bool OfferedInPlace::awaits(const SourceLink& receiver) const {
  return on_offer() && receiver.done_version() != version_;
}

bool OfferedInPlace::undecided() const {
  return preparing() || (on_offer() && !session_.terms().all_ended(version_));
}

void OfferedInPlace::on_prepared() {
  show();
  sender_.on_unpinned();
}

void OfferedInPlace::on_reading() {
  sender_.on_reading(session_);
}

void OfferedInPlace::on_not_taken(const SourceLink& receiver, const Status& status) {
  if (!failing()) fail(Status(status.code(), fmt::format("{}: {}", receiver.name(), status.message())));
}

void OfferedInPlace::on_stream_failed(const Status& status) {
  if (on_offer()) fail(status);
}

// A receiver that has all it wanted may go while others are still at it.
void OfferedInPlace::on_broken(const Status& latest) {
  const auto gone = [&](const auto& entry) {
    return !entry.second->open() && entry.second->done_version() != version_;
  };
  if (on_offer() && std::ranges::none_of(session_.receivers(), gone)) return session_.check_ended();
  fail(latest);
}

void OfferedInPlace::take_back(const Status& status) {
  session_.digests().abort(slot_, status);
  bus::take_back(session_.receivers(), version_, status);
}

void OfferedInPlace::check_ended() {
  if (!on_offer() && !failing()) return;
  if (session_.digests().running(slot_) || session_.preparation().busy() || session_.reading()) return;
  const auto done = [&](const auto& entry) { return entry.second->done_version() == version_; };
  if (on_offer() && !std::ranges::all_of(session_.receivers(), done)) return;
  const Status status = on_offer() ? Status() : failure_;
  state_ = State::kNone;
  session_.let_go(version_);
  session_.end_reading();
  sender_.on_offer_over(session_, status);
}

}  // namespace tessera::bus
