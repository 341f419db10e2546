#include "bus/sender_session.h"

#include <algorithm>

#include "base/fail.h"
#include "base/log.h"

namespace tessera::bus {
namespace {

constexpr Duration kRevokeGrace = seconds(5);  // for receivers to stop reading

}  // namespace

SenderSession::SenderSession(SessionSetup setup, SenderSessionOwner& owner)
    : Session(std::move(setup)), owner_(owner), digests_done_(loop(), [this] { on_digests(); }) {
  // Scratch comes before anyone can attach: its place is told with the rest.
  if (setup_.routes.reductions.empty()) return;
  reducer_ =
      std::make_unique<Reducer>(*setup_.agent, setup_, attach_message(Attach::Purpose::kReduce),
                                Reducer::Events{.ready_changed = [this] { attached_one(); },
                                                .lost = [this](const Status& status) { break_session(status); },
                                                .reduced = [this](const Status& status) { on_reduced(status); }});
  setup_.on_allocation();
}

// --- attaching
// --------------------------------------------------------------------------------------------------------

void SenderSession::connect() {
  if (!reducer_) return;
  for (const auto& link : reducer_->links()) {
    PullLink* to = link.get();
    calls_.push_back({link->name(), setup_.view.own[static_cast<size_t>(link->rank())],
                      [to](std::shared_ptr<Link> made) { to->adopt(std::move(made)); }});
  }
}

std::vector<std::string> SenderSession::unready() const {
  std::vector<std::string> names;
  const auto missing = [](const auto& links, Rank rank) {
    const auto it = links.find(rank);
    return it == links.end() || !it->second->ready();
  };
  for (Rank rank = 0; rank < static_cast<Rank>(setup_.view.peer.size()); ++rank)
    if (missing(receivers_, rank)) names.push_back(rank_name(setup_.view.peer_job, rank));
  for (Rank rank = 0; rank < static_cast<Rank>(setup_.view.own.size()); ++rank)
    if (rank != identity().rank && !setup_.routes.reduced_by[static_cast<size_t>(rank)].empty() &&
        missing(owners_, rank))
      names.push_back(rank_name(identity().job, rank));
  if (reducer_)
    for (const auto& link : reducer_->links())
      if (!link->ready()) names.push_back(link->name());
  return names;
}

SourceRoute SenderSession::source_route(const LinkRoute& route) const {
  const Match::Tensor& matched = setup_.agreement.match.tensors[route.tensor];
  const LocalTensor& local = setup_.tensors[route.tensor];
  return {.what = {.tensor = route.tensor, .shape = matched.shape, .dtype = matched.src_dtype, .region = route.region},
          .src = local.array,
          .data = local.data};
}

SourceRoute SenderSession::sent_route(const SentRoute& route) const {
  SourceRoute source = source_route({.tensor = route.tensor, .route = 0, .region = route.region, .src_owned = {}});
  if (route.reduction == SentRoute::kNone) return source;
  source.src = {.owned = route.region, .strides = byte_strides(source.what.dtype, route.region.extents())};
  source.data = reducer_->result(route.reduction);
  return source;
}

std::vector<Served> SenderSession::served_to(const Caller& caller) const {
  std::vector<Served> served;
  const auto rank = static_cast<size_t>(caller.hello.rank);
  if (caller.attach.purpose == Attach::Purpose::kReduce) {
    for (const LinkRoute& route : setup_.routes.reduced_by[rank]) served.push_back({source_route(route), false});
  } else {
    for (const LinkRoute& route : setup_.routes.by_peer[rank]) {
      const SentRoute& sent = setup_.routes.sent[route.route];
      served.push_back({sent_route(sent), sent.reduction != SentRoute::kNone});
    }
  }
  return served;
}

void SenderSession::accept(Caller caller) {
  const bool reduces = caller.attach.purpose == Attach::Purpose::kReduce;
  if (caller.attach.purpose == Attach::Purpose::kControl)
    fail(ErrorCode::kMismatch, "{}: {} offers it and chooses no version", describe(), identity().name());
  check_caller(caller, reduces ? identity().job : setup_.view.peer_job, reduces ? setup_.view.own : setup_.view.peer);
  auto& links = reduces ? owners_ : receivers_;
  const Rank rank = caller.hello.rank;
  if (links.contains(rank))
    fail(ErrorCode::kAlreadyExists, "{}: {} is attached already", describe(), caller.link->name());
  std::vector<Served> served = served_to(caller);
  links.emplace(rank, std::make_unique<SourceLink>(*setup_.agent, *this, std::move(caller), std::move(served),
                                                   setup_.agreement.digest && !reduces));
}

void SenderSession::on_source_ready(SourceLink& link) {
  if (link.rings()) setup_.on_allocation();
  if (receivers_.contains(link.rank()) && receivers_.at(link.rank()).get() == &link) rank_bytes_ += link.bytes();
  attached_one();
}

void SenderSession::attached_one() {
  if (unready().empty()) build_digest_program();
  readiness_changed();
}

void SenderSession::build_digest_program() {
  if (!setup_.agreement.digest || digest_program_) return;
  std::vector<bool> wanted(setup_.routes.sent.size(), false);
  for (const auto& [rank, link] : receivers_)
    if (!link->rings())
      for (const LinkRoute& route : setup_.routes.by_peer[static_cast<size_t>(rank)]) wanted[route.route] = true;
  std::vector<SourceRoute> routes;
  for (uint32_t i = 0; i < wanted.size(); ++i) {
    if (!wanted[i]) continue;
    digested_.push_back(i);
    routes.push_back(sent_route(setup_.routes.sent[i]));
  }
  digest_program_ = std::make_shared<SourceProgram>(routes, SourceOptions{.digest = true, .ring = false});
  digest_run_ = std::make_unique<SourceRun>(
      digest_program_, setup_.agent->source_pool(), [this] { digests_done_.raise(); }, "the digests");
}

// --- offering
// ---------------------------------------------------------------------------------------------------------

void SenderSession::offer(int64_t version) {
  offering_ = version;
  ++offers_;
  failure_ = {};
  failure_cause_ = {};
  have_digests_ = false;
  last_activity_ = Clock::steady().now();
  for (const auto& [rank, link] : owners_) link->offer(version);
  phase_ = Phase::kReducing;
  if (reducer_)
    reducer_->start(version);
  else
    offer_reduced();
}

void SenderSession::on_reduced(const Status& status) {
  if (phase_ == Phase::kFailing) return check_ended();
  if (phase_ != Phase::kReducing) return;
  if (!status.ok()) return fail_offer(status);
  offer_reduced();
}

void SenderSession::offer_reduced() {
  phase_ = Phase::kOffered;
  for (const auto& [rank, link] : receivers_)
    if (link->open()) link->offer(offering_);
  if (!digest_run_) return;
  if (digested_.empty()) {
    have_digests_ = true;
    return;
  }
  digest_running_ = true;
  digest_run_->start(offers_);
}

void SenderSession::on_take(SourceLink& link, int64_t version, uint32_t epoch) {
  const bool reduces = owners_.contains(link.rank()) && owners_.at(link.rank()).get() == &link;
  const bool on_offer = version == offering_ && (phase_ == Phase::kOffered || (reduces && phase_ == Phase::kReducing));
  if (!on_offer) {
    const bool given_up = version == offering_ && !failure_cause_.ok();
    return link.refuse(version, epoch, given_up ? failure_cause_ : failed(ErrorCode::kCancelled, "it was withdrawn"));
  }
  if (link.running()) fail(ErrorCode::kMismatch, "Take of version {} before the last one's ring was drained", version);
  last_activity_ = Clock::steady().now();
  link.grant(version, epoch);
  owner_.on_taking(*this);
  if (have_digests_ && !reduces) send_digests(link);
}

void SenderSession::on_digests() {
  digest_running_ = false;
  have_digests_ = digest_run_->status().ok();
  if (phase_ == Phase::kOffered)
    for (const auto& [rank, link] : receivers_)
      if (link->taking() == offering_) send_digests(*link);
  check_ended();
}

void SenderSession::send_digests(SourceLink& link) {
  if (link.rings() || !setup_.agreement.digest) return;
  const std::vector<LinkRoute>& routes = setup_.routes.by_peer[static_cast<size_t>(link.rank())];
  const std::span<const Digest> digests = digest_run_->digests();
  for (size_t i = 0; i < routes.size(); ++i) {
    const auto at = std::ranges::lower_bound(digested_, routes[i].route);
    link.digests()[i] = digests[static_cast<size_t>(at - digested_.begin())];
  }
  link.send_digests(offering_);
}

void SenderSession::on_source_run_done(SourceLink& link) {
  const Status status = link.run()->status();
  if (!status.ok() && phase_ == Phase::kOffered && link.open()) {
    fail_offer(status);
  } else if (status.ok() && link.taking() != 0 && !link.run_digests().empty()) {
    link.send_digests(link.taking());
  }
  check_ended();
}

void SenderSession::on_progress(SourceLink&) {
  last_activity_ = Clock::steady().now();
}

void SenderSession::on_done(SourceLink& link, const Done& done) {
  last_activity_ = Clock::steady().now();
  const bool receives = receivers_.contains(link.rank()) && receivers_.at(link.rank()).get() == &link;
  if (!done.status.ok()) {
    link.abort_run(done.status);
    if (done.version == offering_ && receives && (phase_ == Phase::kOffered || phase_ == Phase::kReducing))
      fail_offer(Status(done.status.code(), fmt::format("{}: {}", link.name(), done.status.message())));
  }
  check_ended();
}

void SenderSession::check_ended() {
  if (phase_ == Phase::kIdle || phase_ == Phase::kReducing) return;
  if (digest_running_ || (reducer_ && reducer_->busy())) return;
  for (const auto* links : {&receivers_, &owners_})
    for (const auto& [rank, link] : *links)
      if (link->running() || (link->open() && link->taking() != 0)) return;
  if (phase_ == Phase::kOffered)
    for (const auto& [rank, link] : receivers_)
      if (link->done_version() != offering_) return;
  end_offer(phase_ == Phase::kOffered ? Status() : failure_);
}

void SenderSession::end_offer(const Status& status) {
  phase_ = Phase::kIdle;
  loop().cancel_timer(std::exchange(revoke_timer_, 0));
  owner_.on_offer_over(*this, status);
  if (retires()) owner_.on_sender_retired(*this);
}

// By tensor, each sent route once: from the shared run, else from the first ring that carried it.
void SenderSession::sum_digests(std::vector<Digest>& sums) {
  sums.assign(setup_.tensors.size(), {});
  counted_.assign(setup_.routes.sent.size(), false);
  const auto add = [&](uint32_t route, const Digest& digest) {
    if (counted_[route]) return;
    counted_[route] = true;
    sums[setup_.routes.sent[route].tensor] += digest;
  };
  for (size_t i = 0; i < digested_.size(); ++i) add(digested_[i], digest_run_->digests()[i]);
  for (const auto& [rank, link] : receivers_) {
    const std::span<const Digest> digests = link->run_digests();
    for (size_t i = 0; i < digests.size(); ++i)
      if (digests[i].elements != 0) add(setup_.routes.by_peer[static_cast<size_t>(rank)][i].route, digests[i]);
  }
}

// --- failing
// ----------------------------------------------------------------------------------------------------------

void SenderSession::fail_offer(const Status& status) {
  if (phase_ == Phase::kIdle || phase_ == Phase::kFailing) return;
  phase_ = Phase::kFailing;
  failure_cause_ = status;
  failure_ = Status(status.code(), fmt::format("{}: {} while {} sent version {}", describe(), status.message(),
                                               identity().name(), offering_));
  if (digest_running_) digest_run_->abort(status);
  if (reducer_) reducer_->abort(status);
  for (const auto* links : {&receivers_, &owners_}) {
    for (const auto& [rank, link] : *links) {
      if (link->open()) link->withdraw(offering_);
      if (link->open() && link->taking() != 0) link->revoke(status);
      link->abort_run(status);
    }
  }
  revoke_timer_ = loop().add_timer_after(kRevokeGrace, [this] { stop_waiting_for_readers(); });
  check_ended();
}

// A receiver that was asked to stop reading does not answer: cut it off, which it sees as the end of this session.
void SenderSession::stop_waiting_for_readers() {
  revoke_timer_ = 0;
  for (const auto* links : {&receivers_, &owners_}) {
    for (const auto& [rank, link] : *links) {
      if (link->taking() == 0 || !link->open()) continue;
      log().warn("{}: {} does not stop reading; its connection is closed", describe(), link->name());
      const Status reason = failed(ErrorCode::kPeerLost, "{} did not answer", link->name());
      link->detach(reason);
      break_session(reason);
    }
  }
  check_ended();
}

bool SenderSession::flows_since(TimePoint then) const {
  const auto taking = [&](const auto& entry) {
    return entry.second->taking() == offering_ || entry.second->done_version() == offering_;
  };
  return phase_ == Phase::kOffered && std::ranges::all_of(receivers_, taking) && last_activity_ > then;
}

std::string SenderSession::who_has_not_taken() const {
  if (phase_ == Phase::kReducing)
    return fmt::format("{} have not offered their terms of the Partial tensors",
                       fmt::join(reducer_->waiting_for(), ", "));
  std::vector<std::string> absent;
  std::vector<std::string> slow;
  for (const auto& [rank, link] : receivers_) {
    if (link->done_version() == offering_) continue;
    (link->taking() == offering_ ? slow : absent).push_back(link->name());
  }
  std::string text;
  if (!absent.empty()) text = fmt::format("{} did not come to take it", fmt::join(absent, ", "));
  if (!slow.empty()) text += fmt::format("{}{} did not finish", text.empty() ? "" : "; ", fmt::join(slow, ", "));
  return text;
}

bool SenderSession::begun() const {
  if (phase_ == Phase::kIdle) return false;
  for (const auto* links : {&receivers_, &owners_})
    for (const auto& [rank, link] : *links)
      if (link->taking() != 0 || link->done_version() == offering_) return true;
  return false;
}

void SenderSession::on_source_detached(SourceLink& link, const Status& reason) {
  if (!broken()) left_ = link.left();
  link.abort_run(reason);
  break_session(reason);
}

void SenderSession::on_source_lost(SourceLink& link, const Status& status) {
  link.abort_run(status);
  break_session(status);
}

void SenderSession::on_source_broken(SourceLink& link, const Status& status) {
  break_session(status);
  if (link.done_version() != offering_) fail_offer(status);  // it will not take this version any more
}

void SenderSession::on_broken(const Status& latest) {
  // Nobody has to be told: whoever can see this peer is connected to it.
  // A receiver that has all it wanted may go while others are still at it.
  if (phase_ == Phase::kOffered) {
    const auto gone = [&](const auto& entry) {
      return !entry.second->open() && entry.second->done_version() != offering_;
    };
    if (std::ranges::none_of(receivers_, gone)) return check_ended();
  }
  fail_offer(latest);
  if (retires()) owner_.on_sender_retired(*this);
}

Progress SenderSession::sample() const {
  Progress progress;
  for (const auto& [rank, link] : receivers_) {
    progress.bytes_total += link->bytes();
    progress.bytes_done += link->progress();
  }
  return progress;
}

void SenderSession::detach_all(const Status& why) {
  for (const auto& [rank, link] : receivers_)
    if (link->open()) link->detach(why);
  for (const auto& [rank, link] : owners_)
    if (link->open()) link->detach(why);
  if (reducer_) reducer_->detach(why);
}

}  // namespace tessera::bus
