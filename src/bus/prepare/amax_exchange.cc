#include "bus/prepare/amax_exchange.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "base/fail.h"
#include "base/fail_point.h"
#include "peer/exchange/messages.h"

namespace tessera::bus {

AmaxExchange::AmaxExchange(Agent& agent, const SessionSetup& setup, std::span<const AmaxKey> own, Events events)
    : agent_(agent), setup_(setup), events_(std::move(events)), keys_(own.begin(), own.end()), result_(own.size()) {
  std::ranges::sort(keys_);
  keys_.erase(std::ranges::unique(keys_).begin(), keys_.end());
  TESSERA_CHECK_LE(keys_.size(), size_t{kMaxAmaxes});
  for (const AmaxKey& key : own)
    places_.push_back(static_cast<uint32_t>(std::ranges::lower_bound(keys_, key) - keys_.begin()));
}

AmaxExchange::~AmaxExchange() {
  if (leader_) leader_->close();
  for (const auto& [rank, follower] : followers_) follower.link->close();
}

// --- attaching -----------------------------------------------------------------------------------

std::vector<Rank> AmaxExchange::peers() const {
  if (!leads()) return {0};
  std::vector<Rank> ranks;
  for (Rank rank = 1; rank < agent_.identity().world; ++rank) ranks.push_back(rank);
  return ranks;
}

bool AmaxExchange::ready(Rank peer) const {
  if (!leads()) return prepared_;
  const auto it = followers_.find(peer);
  return it != followers_.end() && it->second.joined;
}

bool AmaxExchange::ready() const {
  return std::ranges::all_of(peers(), [this](Rank peer) { return ready(peer); });
}

void AmaxExchange::adopt(std::shared_ptr<Link> link) {
  leader_ = std::move(link);
  leader_->set_handlers([this](Frame& frame) { handle_leader(frame); },
                        [this](const Status& status) { lose(status, nullptr); },
                        [this](const Detach& detach) { lose(detach.reason(leader_->name()), nullptr); },
                        [this](const Status& status) { lose(status, nullptr); });
  leader_->watch_process(setup_.view.own[0].incarnation);
  leader_->watch_worker(setup_.view.own[0].worker);
}

void AmaxExchange::handle_leader(Frame& frame) {
  switch (frame.type) {
    case kCode<Prepared>:
      if (std::exchange(prepared_, true)) fail(ErrorCode::kMismatch, "Prepared out of turn"_message);
      leader_->send(Joins{.keys = keys_});
      return events_.ready_changed();
    case kCode<Agreed>:
      heard_ = parse<Agreed>(frame.payload, {.amaxes = std::move(heard_.amaxes)});
      return handle_agreed(heard_);
    default:
      fail(ErrorCode::kMismatch, "unexpected message {}"_message, frame.type);
  }
}

void AmaxExchange::accept(Caller caller) {
  const Rank rank = caller.hello.rank;
  if (!leads() || rank == 0)
    fail(ErrorCode::kMismatch, "{} collects no amaxes: rank 0 does"_message, agent_.identity().name());
  if (followers_.contains(rank))
    fail(ErrorCode::kAlreadyExists, "{}: {} is attached already"_message, agent_.identity().name(),
         caller.link->name());
  caller.link->set_handlers([this, rank](Frame& frame) { handle_follower(rank, frame); },
                            [this, rank](const Status& status) { lose(status, &followers_.at(rank)); },
                            [this, rank](const Detach& detach) {
                              Follower& follower = followers_.at(rank);
                              lose(detach.reason(follower.name), &follower);
                            });
  caller.link->watch_process(caller.hello.incarnation);
  caller.link->watch_worker(setup_.view.own[static_cast<size_t>(rank)].worker);
  Follower& follower = followers_[rank];
  follower.name = caller.link->name();
  follower.link = std::move(caller.link);
  follower.link->ask<Joins>(Prepared{});
}

void AmaxExchange::handle_follower(Rank rank, Frame& frame) {
  Follower& follower = followers_.at(rank);
  if (frame.type == kCode<Joins> && !follower.joined) return handle_joins(follower, parse<Joins>(frame.payload));
  if (frame.type == kCode<Amaxes> && follower.joined) return handle_report(rank, follower, frame);
  fail(ErrorCode::kMismatch, "unexpected message {}"_message, frame.type);
}

void AmaxExchange::handle_joins(Follower& follower, Joins joins) {
  follower.keys = std::move(joins.keys);
  follower.places.resize(follower.keys.size());
  follower.joined = true;
  if (ready()) merge_keys();
  events_.ready_changed();
}

void AmaxExchange::merge_keys() {
  const std::vector<AmaxKey> own = keys_;
  for (const auto& [rank, follower] : followers_) keys_.insert(keys_.end(), follower.keys.begin(), follower.keys.end());
  std::ranges::sort(keys_);
  keys_.erase(std::ranges::unique(keys_).begin(), keys_.end());
  if (std::ranges::any_of(keys_, &AmaxKey::given)) given_by_.resize(keys_.size());
  const auto place_of = [this](const AmaxKey& key) {
    return static_cast<uint32_t>(std::ranges::lower_bound(keys_, key) - keys_.begin());
  };
  for (uint32_t& place : places_) place = place_of(own[place]);
  for (auto& [rank, follower] : followers_) {
    std::ranges::transform(std::exchange(follower.keys, {}), follower.places.begin(), place_of);
  }
}

// --- a version -----------------------------------------------------------------------------------

void AmaxExchange::start(int64_t version, std::span<const float> amaxes, const NonfiniteFinding& finding) {
  TESSERA_CHECK(ready() && !busy());
  TESSERA_CHECK_EQ(amaxes.size(), finding.any() ? 0 : places_.size());
  version_ = version;
  own_.version = version;
  own_.epoch = ++epoch_;
  own_.finding = finding;
  own_.finding.rank = agent_.identity().rank;
  own_.amaxes.assign(finding.any() ? 0 : keys_.size(), 0);
  for (size_t i = 0; i < amaxes.size(); ++i) own_.amaxes[places_[i]] = std::max(own_.amaxes[places_[i]], amaxes[i]);
  if (!lost_.ok()) return abort(lost_);
  if (!leads()) {
    leader_->send(own_);
    return fail_point("wire: reported");
  }
  fail_point("wire: reported");
  for (auto& [rank, follower] : followers_) {
    if (follower.passed >= version)
      return fail_round(has_passed(follower.name, version), has_passed(follower.name, version));
    if (follower.reported) consider(follower);
    if (!busy()) return;
  }
  check_round();
}

void AmaxExchange::abort(const Status& status) {
  if (!busy()) return;
  if (leads()) return fail_round(status, heard_from_here(status));
  if (leader_->open()) leader_->send(Amaxes{.version = version_, .epoch = epoch_, .status = status});
  finish(status);
}

void AmaxExchange::give_up(int64_t version, const Status& status) {
  TESSERA_CHECK(!busy());
  if (leads())
    fail_followers(version, heard_from_here(status));
  else if (leader_->open())
    leader_->send(Amaxes{.version = version, .epoch = ++epoch_, .status = status});
}

void AmaxExchange::passed(int64_t version) {
  TESSERA_CHECK(!busy());
  const Status status = has_passed(agent_.identity().name(), version);
  if (!leads()) {
    if (leader_->open()) leader_->send(Amaxes{.version = version, .epoch = 0, .status = status});
    return;
  }
  passed_ = version;
  for (auto& [rank, follower] : followers_)
    if (follower.reported) consider(follower);
}

void AmaxExchange::handle_agreed(const Agreed& agreed) {
  if (!busy() || agreed.epoch != epoch_) return;  // the version is over here, or has been begun again
  require_known(agreed.finding);
  const bool whole = agreed.status.ok() && !agreed.finding.any();
  if (agreed.version != version_ || (whole && agreed.amaxes.size() != keys_.size()))
    fail(ErrorCode::kMismatch, "Agreed of version {} with {} amaxes where {} were asked for of version {}"_message,
         agreed.version, agreed.amaxes.size(), keys_.size(), version_);
  finish(whole ? Status() : !agreed.status.ok() ? agreed.status : status_of(agreed.finding), agreed.amaxes);
}

// --- rank 0 --------------------------------------------------------------------------------------

void AmaxExchange::handle_report(Rank rank, Follower& follower, Frame& frame) {
  read_ = parse<Amaxes>(frame.payload, {.amaxes = std::move(read_.amaxes)});
  const Amaxes& report = read_;
  require_known(report.finding);
  const bool whole = report.status.ok() && !report.finding.any();
  if (whole && report.amaxes.size() != follower.places.size())
    fail(ErrorCode::kMismatch, "Amaxes of version {}: {} where {} keys have joined"_message, report.version,
         report.amaxes.size(), follower.places.size());
  if (report.finding.any() && report.finding.rank != rank)
    fail(ErrorCode::kMismatch, "Amaxes of version {} tell of what rank {} has found"_message, report.version,
         report.finding.rank);
  if (report.epoch == 0 ? report.status.ok() : report.epoch < follower.report.epoch)
    fail(ErrorCode::kMismatch, "Amaxes of version {} in epoch {} out of turn"_message, report.version, report.epoch);
  if (report.epoch == 0) {
    follower.passed = std::max(follower.passed, report.version);
    const Status status = busy() ? has_passed(follower.name, version_) : Status();
    if (busy() && version_ <= follower.passed) fail_round(status, status);
    return;
  }
  if (follower.reported && !follower.report.status.ok() && report.version > follower.report.version) {
    follower.given_up = follower.report.version;
    follower.given_up_for = told_by(follower);
  }
  std::swap(follower.report, read_);
  if (follower.report.epoch <= follower.answered) return;  // it gave up while the answer was on its way
  follower.reported = true;
  consider(follower);
  if (busy()) check_round();
}

// Handles what it has reported, as far as that does not depend on the others.
void AmaxExchange::consider(Follower& follower) {
  const int64_t version = follower.report.version;
  if (busy() && version == version_) {
    if (follower.report.status.ok()) return;
    const Status told = told_by(follower);
    return fail_round(told, told);
  }
  if (version <= passed_) return answer(follower, has_passed(agent_.identity().name(), version));
  if (version <= follower.failed_version) return answer(follower, Status(follower.failure));
  if (!busy()) return;
  if (version < version_) return answer(follower, not_collective(follower));
  const Status status = follower.given_up == version_ ? follower.given_up_for : not_collective(follower);
  fail_round(status, status);  // it is past that version
}

void AmaxExchange::answer(Follower& follower, const Status& status) {
  follower.reported = false;
  follower.answered = follower.report.epoch;
  if (follower.report.version >= follower.failed_version) follower.failed_version = 0;
  if (follower.link->open())
    follower.link->send(Agreed{.version = follower.report.version, .epoch = follower.report.epoch, .status = status});
}

void AmaxExchange::check_round() {
  const auto told = [this](const auto& entry) {
    return entry.second.reported && entry.second.report.version == version_;
  };
  if (!std::ranges::all_of(followers_, told)) return;
  const auto order = [](const NonfiniteFinding& finding) {
    return std::tuple(finding.tensor, finding.index, finding.rank);
  };
  NonfiniteFinding least = own_.finding;
  for (const auto& [rank, follower] : followers_)
    least = std::min(least, follower.report.finding, [&](auto& a, auto& b) { return order(a) < order(b); });
  if (const Status status = least.any() ? Status() : merge_reports(); !status.ok()) return fail_round(status, status);
  for (auto& [rank, follower] : followers_) {
    told_.version = version_;
    told_.epoch = follower.report.epoch;
    told_.finding = least;
    told_.amaxes.resize(least.any() ? 0 : follower.places.size());
    for (size_t i = 0; i < told_.amaxes.size(); ++i) told_.amaxes[i] = own_.amaxes[follower.places[i]];
    follower.reported = false;
    follower.answered = follower.report.epoch;
    follower.failed_version = 0;
    if (follower.link->open()) follower.link->send(told_);
  }
  finish(least.any() ? status_of(least) : Status(), own_.amaxes);
}

Status AmaxExchange::merge_reports() {
  constexpr Rank kNobody = -1;  // has told it yet
  if (!given_by_.empty()) {
    std::ranges::fill(given_by_, kNobody);
    for (const uint32_t place : places_) given_by_[place] = 0;
  }
  for (const auto& [rank, follower] : followers_) {
    for (size_t i = 0; i < follower.places.size(); ++i) {
      const uint32_t place = follower.places[i];
      const float told = follower.report.amaxes[i];
      float& amax = own_.amaxes[place];
      if (keys_[place].given()) {
        if (given_by_[place] != kNobody && told != amax) return differs(place, given_by_[place], rank, told);
        given_by_[place] = rank;
      }
      amax = std::max(amax, told);
    }
  }
  return {};
}

Status AmaxExchange::differs(uint32_t place, Rank first, Rank second, float told) const {
  const AmaxKey& key = keys_[place];
  const std::vector<Match::Tensor>& tensors = setup_.agreement.match.tensors;
  const auto rank = [this](Rank of) { return rank_name(agent_.identity().job, of); };
  return failed(
      ErrorCode::kMismatch,
      "tensor {}: its matrix {} is quantised with {} {} on {} and {} on {}: shards that are quantised already "
      "need the amax of the whole tensor: quantize(shard, amax=...)"_message,
      key.group < tensors.size() ? tensors[key.group].name : "?", key.matrix,
      key.column == AmaxKey::kGivenScale ? "scale" : "amax", own_.amaxes[place], rank(first), told, rank(second));
}

void AmaxExchange::fail_round(const Status& own, const Status& others) {
  fail_followers(version_, others);
  finish(own);
}

void AmaxExchange::fail_followers(int64_t version, const Status& status) {
  for (auto& [rank, follower] : followers_) {
    if (follower.reported && follower.report.version == version) {
      answer(follower, status);
    } else {
      follower.failed_version = version;
      follower.failure = status;
    }
  }
}

// --- both ----------------------------------------------------------------------------------------

void AmaxExchange::finish(const Status& status, std::span<const float> amaxes) {
  version_ = 0;
  if (status.ok()) {
    fail_point("wire: agreed");
    for (size_t i = 0; i < places_.size(); ++i) result_[i] = amaxes[places_[i]];
  }
  events_.agreed(status, status.ok() ? std::span<const float>(result_) : std::span<const float>());
}

// The others have no connection with the rank that rank 0 has lost.
void AmaxExchange::lose(const Status& status, const Follower* whom) {
  if (lost_.ok()) lost_ = status;
  for (const auto& [rank, follower] : followers_)
    if (&follower != whom && follower.link->open()) follower.link->send(Broken{.status = status});
  events_.lost(status);
}

std::vector<Link*> AmaxExchange::links() const {
  std::vector<Link*> links;
  if (leader_) links.push_back(leader_.get());
  for (const auto& [rank, follower] : followers_) links.push_back(follower.link.get());
  return links;
}

void AmaxExchange::detach(const Status& why) {
  const auto leave = [&](Link& link) {
    if (link.open()) link.send(Detach{.status = why});
    link.close();
  };
  if (leader_) leave(*leader_);
  for (const auto& [rank, follower] : followers_) leave(*follower.link);
}

std::vector<std::string> AmaxExchange::waiting_for() const {
  std::vector<std::string> names;
  if (!busy()) return names;
  for (const Rank peer : peers()) {
    const auto it = followers_.find(peer);
    if (it == followers_.end() || !it->second.reported) names.push_back(rank_name(agent_.identity().job, peer));
  }
  return names;
}

std::vector<Link*> AmaxExchange::awaited_links() const {
  std::vector<Link*> links;
  if (!busy()) return links;
  if (leader_) links.push_back(leader_.get());
  for (const auto& [rank, follower] : followers_)
    if (!follower.reported) links.push_back(follower.link.get());
  return links;
}

void AmaxExchange::require_known(const NonfiniteFinding& finding) const {
  if (!finding.any()) return;
  const std::vector<Match::Tensor>& tensors = setup_.agreement.match.tensors;
  const bool known = finding.tensor < tensors.size() && tensors[finding.tensor].wire.has_value() &&
                     finding.index < static_cast<uint64_t>(element_count(tensors[finding.tensor].shape)) &&
                     static_cast<size_t>(finding.rank) < setup_.view.own.size();
  if (!known)
    fail(ErrorCode::kMismatch, "rank {} has found {} at element {} of tensor {}, which is not there"_message,
         finding.rank, finding.value, finding.index, finding.tensor);
}

Status AmaxExchange::status_of(const NonfiniteFinding& finding) const {
  const Match::Tensor& tensor = setup_.agreement.match.tensors[finding.tensor];
  std::vector<Index> place(tensor.shape.size());
  auto rest = static_cast<Index>(finding.index);
  for (size_t dim = place.size(); dim-- > 0;) {
    place[dim] = rest % tensor.shape[dim];
    rest /= tensor.shape[dim];
  }
  const char* value = std::isnan(finding.value) ? "nan" : finding.value < 0 ? "-inf" : "inf";
  return failed(ErrorCode::kInvalidArgument, "tensor {}: {} at [{}] (rank {}): {} takes only finite values"_message,
                tensor.name, value, fmt::join(place, ", "), rank_name(agent_.identity().job, finding.rank),
                to_string(*tensor.wire));
}

Status AmaxExchange::not_collective(const Follower& follower) const {
  return failed(ErrorCode::kMismatch, "{} sends version {}, {} version {}: send is collective"_message, follower.name,
                follower.report.version, agent_.identity().name(), version_);
}

Status AmaxExchange::told_by(const Follower& follower) {
  const Status& status = follower.report.status;
  return Status(status.code(), fmt::format("{}: {}", follower.name, status.message()));
}

Status AmaxExchange::heard_from_here(const Status& status) const {
  return Status(status.code(), fmt::format("{}: {}", agent_.identity().name(), status.message()));
}

Status AmaxExchange::has_passed(const std::string& name, int64_t version) {
  return failed(ErrorCode::kPeerLost, "{} has sent version {} already"_message, name, version);
}

}  // namespace tessera::bus
