#include "bus/receiver/election.h"

#include "base/fail.h"

namespace tessera::bus {

Election::Election(const Identity& self, const SenderLinks& senders, const OwnRanks& own_ranks, int64_t floor)
    : self_(self),
      senders_(senders),
      own_ranks_(own_ranks),
      floor_(floor),
      got_(static_cast<size_t>(std::max(1, self.world)), 0) {}

int64_t Election::complete_version() const {
  for (int64_t version = senders_.front()->offered(); version != 0;) {
    int64_t lower = version;  // the newest that a sender without this version offers instead
    for (const auto& link : senders_) {
      if (!link->open()) return 0;
      if (!link->offers(version)) lower = std::min(lower, link->newest_below(version));
    }
    if (lower == version) return version;
    version = lower;
  }
  return 0;
}

// --- what this rank takes ------------------------------------------------------------------------

void Election::want(int64_t min_version) {
  wanted_ = min_version;
  lower_min_version();
}

void Election::lower_min_version() {
  min_version_ = std::max(wanted_, floor_ + 1);
}

void Election::hear(const Chosen& chosen) {
  if (chosen.version < floor_ || chosen.epoch <= epoch_ || (chosen_ && chosen.epoch <= chosen_->epoch))
    fail(ErrorCode::kMismatch, "Chosen of version {} in epoch {} out of turn"_message, chosen.version, chosen.epoch);
  chosen_ = chosen;
}

void Election::begin(const Chosen& chosen) {
  epoch_ = chosen.epoch;
  chosen_.reset();  // `chosen` may refer to it
}

void Election::pass_up(const Status& why) {
  const Chosen chosen = *std::exchange(chosen_, std::nullopt);
  epoch_ = chosen.epoch;
  tell_got(chosen.version, why);
}

void Election::tell_got(int64_t version, const Status& status) const {
  own_ranks_.tell_leader(Got{.version = version, .epoch = epoch_, .reason = status});
}

// --- rank 0 --------------------------------------------------------------------------------------

void Election::choose() {
  const int64_t version = complete_version();
  if (holding_ != 0 || version < min_version_ || !all_have_announced()) return;
  holding_ = version;
  ++epoch_;
  for (const auto& link : senders_) link->hold(version, epoch_);
}

void Election::stop_holding() {
  if (std::exchange(holding_, 0) == 0) return;
  for (const auto& link : senders_) link->release();
  tell_those_behind();
}

// In place that is whoever has an older version on offer; its others have given that up. Staged, ranks need not keep
// pace; only before the first version is chosen, one may have come back and count from an earlier one.
void Election::tell_those_behind() const {
  int64_t newest = 0;
  for (const auto& link : senders_) newest = std::max(newest, link->offered());
  for (const auto& link : senders_) link->tell_ahead(newest, epoch_ == 0);
}

std::optional<Chosen> Election::announce() {
  if (!std::ranges::all_of(senders_, [](const auto& link) { return link->holds(); })) return std::nullopt;
  const Chosen chosen{.version = std::exchange(holding_, 0), .epoch = epoch_};
  announced_ = epoch_;
  floor_before_.reset();
  refusal_ = {};
  own_ranks_.tell_followers(chosen);
  return chosen;
}

void Election::note_got(Rank rank, const Got& got) {
  uint32_t& last = got_[static_cast<size_t>(rank)];
  if (got.epoch != announced_ || last >= got.epoch)
    fail(ErrorCode::kMismatch, "Got of epoch {} where {} was announced"_message, got.epoch, announced_);
  last = got.epoch;
  if (got.reason.ok()) return;
  if (refusal_.ok())
    refusal_ = Status(got.reason.code(), fmt::format("{}: {}", rank_name(self_.job, rank), got.reason.message()));
  // In place, this rank may have the version although `rank` has not. It may be sent again, and all take it again.
  // Staged, no rank takes it before all have got it.
  floor_ = floor_before_.value_or(floor_);
}

bool Election::all_have(uint32_t epoch) const {
  return std::all_of(got_.begin() + 1, got_.end(), [&](uint32_t last) { return last >= epoch; });
}

std::vector<Link*> Election::awaited_links() const {
  std::vector<Link*> links;
  if (own_ranks_.leader) links.push_back(own_ranks_.leader.get());
  for (const auto& [rank, follower] : own_ranks_.followers)
    if (awaits(rank)) links.push_back(follower.get());
  return links;
}

std::string Election::missing() const {
  if (!leads()) return rank_name(self_.job, 0) + " to choose a version";
  for (Rank rank = 1; rank < static_cast<Rank>(got_.size()); ++rank)
    if (awaits(rank)) return fmt::format("{}, which has not taken the last one", rank_name(self_.job, rank));
  std::vector<std::string> names;
  for (const auto& link : senders_)
    if (link->offered() < min_version_)
      names.push_back(link->offered() == 0 ? link->name()
                                           : fmt::format("{} (offers {})", link->name(), link->offered()));
  if (names.empty())
    for (const auto& link : senders_) names.push_back(fmt::format("{} (offers {})", link->name(), link->offered()));
  return fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace tessera::bus
