#include "bus/receiver/taken_version.h"

#include <algorithm>
#include <utility>

#include "base/fail.h"
#include "bus/receiver/receiver_batch.h"

namespace tessera::bus {

bool ReceiverParts::can_take(int64_t version) const {
  const auto lost = [&](const auto& link) { return !link->open() && !link->pulled(version); };
  if (std::ranges::any_of(links, lost)) return false;
  return !setup.staged || own_ranks.all_open();  // staged, all ranks of the job are needed
}

TakenVersion::TakenVersion(const ReceiverParts& parts, const Chosen& chosen)
    : parts_(parts), version_(chosen.version), epoch_(chosen.epoch) {}

bool TakenVersion::may_go_on() const {
  return state_ == State::kPulling && parts_.can_take(version_);
}

std::vector<Link*> TakenVersion::awaited_links() const {
  std::vector<Link*> links;
  for (const auto& link : parts_.links)
    if (link->busy()) links.push_back(link->connection());
  return links;
}

void TakenVersion::begin() {
  parts_.batch.on_chosen(version_);
  take_more();
  if (!parts_.broken.ok() && !parts_.can_take(version_)) fail(parts_.broken);
  if (parts_.links.empty()) check_pulled();  // this rank holds nothing that moves
}

// Mapped and one-sided sources are all asked at once. A stream occupies a thread on each side while it is drained, so
// no more are asked than can be drained: otherwise two ranks could wait for each other's sources for ever. Each rank
// begins with a different source, so that they do not all read from the same one.
void TakenVersion::take_more() {
  const size_t count = parts_.links.size();
  const auto threads = static_cast<size_t>(parts_.setup.agent->threads());
  const auto drains = [](const auto& link) { return link->streams() && link->busy(); };
  auto streams = static_cast<size_t>(std::ranges::count_if(parts_.links, drains));
  for (size_t i = 0; i < count && state_ == State::kPulling; ++i) {
    PullLink& link = *parts_.links[(i + static_cast<size_t>(parts_.identity().rank)) % count];
    if (link.asked(epoch_) || (link.streams() && streams >= threads)) continue;
    if (link.streams()) ++streams;
    ask(link);
  }
}

void TakenVersion::pulled(const PullLink& link, const Status& status) {
  if (status.ok()) {
    parts_.setup.on_moved(link.granted_bytes(), link.deltas());
    take_more();
  } else {
    fail(status);
  }
  check_pulled();
}

void TakenVersion::check_pulled() {
  if (state_ != State::kPulling && state_ != State::kFailing) return;
  if (std::ranges::any_of(parts_.links, [](const auto& link) { return link->busy(); })) return;
  if (state_ == State::kFailing) {
    tell_failure();
    return end(failure_);
  }
  if (std::ranges::all_of(parts_.links, [this](const auto& link) { return link->pulled(version_); })) complete();
}

void TakenVersion::fail(const Status& why) {
  if (state_ != State::kPulling) return;
  state_ = State::kFailing;
  failure_ = Status(why.code(), fmt::format("{}: {} while {} received version {}"_message, parts_.name, why.message(),
                                            parts_.identity().name(), version_));
  end_leases(why);
  for (const auto& link : parts_.links)  // otherwise these senders would wait for this rank
    if (!link->busy() && !link->pulled(version_)) link->send_done(version_, why);
  for (const auto& link : parts_.links)
    if (link->busy()) link->abort(why);
  check_pulled();
}

bool TakenVersion::report_progress() {
  if (state_ != State::kPulling) return false;
  int64_t bytes = 0;
  for (const auto& link : parts_.links) {
    bytes += link->bytes_done();
    link->send_progress();
  }
  if (std::exchange(bytes_, bytes) != bytes) moved();
  return true;
}

void TakenVersion::moved() {
  parts_.batch.on_flow();
}

Status TakenVersion::overdue() const {
  std::vector<std::string> names;
  for (const auto& link : parts_.links)
    if (link->busy()) names.push_back(link->name());
  return failed(ErrorCode::kDeadlineExceeded, "no progress for {:.0f} s from {}"_message,
                to_seconds(parts_.setup.stall), fmt::join(names, ", "));
}

void TakenVersion::end(const Status& status) {
  state_ = State::kOver;
  parts_.over(status);
}

}  // namespace tessera::bus
