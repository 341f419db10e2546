#include "bus/sender/offered_version.h"

#include <algorithm>

#include "bus/sender/sender_session.h"

namespace tessera::bus {

void OfferedVersion::offer(int64_t version, bool copied) {
  version_ = version;
  failure_ = {};
  cause_ = {};
  session_.begin_offer(*this);
  session_.terms().offer(version);
  state_ = State::kPreparing;
  session_.preparation().start(version, slot_, copied);
}

void OfferedVersion::copied(const Status& status) {
  if (!preparing()) return;
  if (!status.ok()) return fail(status);
  session_.preparation().copied();
}

bool OfferedVersion::show() {
  state_ = State::kOnOffer;
  for (const auto& [rank, link] : session_.receivers())
    if (link->open()) link->offer(version_, slot_);
  return session_.digests().begin(slot_, version_, session_.preparation().compared(version_, slot_));
}

void OfferedVersion::withdraw() const {
  for (const auto& [rank, link] : session_.receivers())
    if (link->open()) link->withdraw(version_);
}

void OfferedVersion::fail(const Status& status) {
  if (!under_way()) return;
  if (failing()) return session_.check_ended();  // whoever it waited for to stop reading may be lost
  state_ = State::kFailing;
  cause_ = status;
  failure_ = session_.not_sent(version_, status);
  session_.preparation().abort(status);
  session_.terms().take_back(status);
  take_back(status);
  session_.bound_reading(SenderSession::kReadGrace);
  session_.check_ended();
}

Status OfferedVersion::why_given_up(int64_t version) const {
  return version == version_ ? cause_ : Status();
}

bool OfferedVersion::pinned() const {
  if (session_.digests().running(slot_)) return true;
  if (!on_offer()) return false;
  return session_.held(version_) || std::ranges::any_of(session_.receivers(), [&](const auto& entry) {
           return entry.second->open() && entry.second->taking() == version_;
         });
}

bool OfferedVersion::flows_since(TimePoint then) const {
  const auto at_it = [&](const auto& entry) {
    return entry.second->taking() == version_ || entry.second->done_version() == version_;
  };
  return on_offer() && std::ranges::all_of(session_.receivers(), at_it) && session_.last_activity() > then;
}

std::string OfferedVersion::who_has_not_taken() const {
  return preparing() ? session_.preparation().missing() : bus::who_has_not_taken(session_.receivers(), version_);
}

std::string OfferedVersion::awaited() const {
  return preparing() ? session_.preparation().awaited() : bus::awaited(session_.receivers(), version_);
}

}  // namespace tessera::bus
