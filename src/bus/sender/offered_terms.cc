#include "bus/sender/offered_terms.h"

#include <algorithm>
#include <utility>

#include "base/fail.h"
#include "bus/sender/sender_session.h"

namespace tessera::bus {

void OfferedTerms::accept(Caller caller, std::vector<ServedRoute> served) {
  const Rank rank = caller.hello.rank;
  if (owners_.contains(rank))
    fail(ErrorCode::kAlreadyExists, "{}: {} is attached already"_message, session_.subject(), caller.link->name());
  const SessionSetup& setup = session_.setup();
  owners_.emplace(rank, std::make_unique<SourceLink>(*setup.agent, *setup.runs, *this, std::move(caller),
                                                     std::move(served), 1, SourceLinkDigest{.on = false}));
}

bool OfferedTerms::ready(Rank rank) const {
  const auto it = owners_.find(rank);
  return it != owners_.end() && it->second->ready();
}

// --- offering ------------------------------------------------------------------------------------

void OfferedTerms::offer(int64_t version) {
  version_ = version;
  for (const auto& [rank, link] : owners_) link->offer(version, 0);
}

void OfferedTerms::take_back(const Status& status) {
  bus::take_back(owners_, version_, status);
}

bool OfferedTerms::all_ended(int64_t version) const {
  return std::ranges::all_of(owners_, [&](const auto& entry) { return entry.second->ended_version() == version; });
}

void OfferedTerms::detach(const Status& why) {
  for (const auto& [rank, link] : owners_)
    if (link->open()) link->detach(why);
}

// --- being read ----------------------------------------------------------------------------------

void OfferedTerms::on_source_ready(SourceLink& link) {
  if (link.streams()) session_.setup().on_allocation();
  session_.attached_one();
}

void OfferedTerms::on_hold(SourceLink& link, int64_t version, uint32_t) {
  fail(ErrorCode::kMismatch, "Hold of version {} by {}: rank 0 of the receivers chooses"_message, version, link.name());
}

void OfferedTerms::on_take(SourceLink& link, const Take& take) {
  if (!session_.offers_terms(take.version))
    return link.refuse(take.version, take.epoch, session_.why_gone(take.version));
  link.grant(take.version, take.epoch, 0, {});
  session_.note_reading();
}

void OfferedTerms::on_progress(SourceLink&) {
  session_.note_activity();
}

void OfferedTerms::on_done(SourceLink& link, const Done& done) {
  if (!done.status.ok()) link.abort_run(done.status);
  session_.note_activity();
  session_.check_ended();
  session_.note_unpinned();
}

void OfferedTerms::on_source_run_done(SourceLink& link) {
  session_.check_stream(link);
  session_.check_ended();
}

void OfferedTerms::on_ahead(SourceLink&, int64_t version) {
  session_.note_own_ahead(version);
}

void OfferedTerms::on_source_detached(SourceLink& link, const Status& reason) {
  session_.end_link(link, reason, link.left());
}

void OfferedTerms::on_source_lost(SourceLink& link, const Status& status) {
  session_.end_link(link, status, false);
}

void OfferedTerms::on_source_broken(SourceLink& link, const Status& status) {
  session_.hear_broken(link, status);
}

}  // namespace tessera::bus
