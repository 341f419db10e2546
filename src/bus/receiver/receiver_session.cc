#include "bus/receiver/receiver_session.h"

#include <algorithm>

#include "base/fail.h"
#include "base/fail_point.h"
#include "bus/receiver/wanted_routes.h"

namespace tessera::bus {
namespace {

constexpr Duration kProgressPeriod = seconds(0.5);  // while data flows

}  // namespace

ReceiverSession::ReceiverSession(SessionSetup setup, ReceiverSessionOwner& owner)
    : Session(std::move(setup)),
      owner_(owner),
      election_(identity(), links_, own_ranks_, setup_.agreement.floor),
      decision_(election_, own_ranks_, broken_,
                {.all_got = [this](int64_t version, uint32_t epoch) { owner_.on_all_got(version, epoch); },
                 .ask_store = [this](int64_t version, uint32_t epoch) { owner_.on_ask_store(version, epoch); },
                 .over = [this](Decided::Verdict verdict, const Status& reason) { end_vote(verdict, reason); }}) {}

ReceiverSession::~ReceiverSession() = default;

// --- attaching -----------------------------------------------------------------------------------

void ReceiverSession::connect() {
  const std::vector<uint32_t> ties = find_ties(setup_.tensors);
  for (Rank rank = 0; rank < static_cast<Rank>(setup_.view.peer.size()); ++rank) {
    if (!setup_.routes.connects(identity().rank, rank)) continue;
    const RankRecord& record = setup_.view.peer[static_cast<size_t>(rank)];
    links_.push_back(std::make_unique<PullLink>(
        *setup_.agent, *setup_.runs, *this, setup_.view.peer_job, rank, record, wanted_routes(setup_, rank, ties),
        PullLinkOptions{.digest = setup_.agreement.digest,
                        .sample = setup_.agreement.sample,
                        .tensor_name = [this](uint32_t tensor) { return tensor_name(tensor); },
                        .delta = setup_.agreement.delta}));
    calls_.push_back({links_.back()->name(), record, Attach::Purpose::kPull,
                      [link = links_.back().get()](std::shared_ptr<Link> made) { link->adopt(std::move(made)); }});
  }
  if (!leads())
    calls_.push_back({rank_name(identity().job, 0), setup_.view.own[0], Attach::Purpose::kControl,
                      [this](std::shared_ptr<Link> link) { adopt_leader(std::move(link)); }});
}

std::vector<Session::Linked> ReceiverSession::linked() const {
  std::vector<Linked> peers;
  for (const auto& link : links_) peers.push_back({link->name(), link->ready()});
  if (!leads()) {
    peers.push_back({rank_name(identity().job, 0), own_ranks_.leader_ready});
    return peers;
  }
  for (Rank rank = 1; rank < identity().world; ++rank)
    peers.push_back({rank_name(identity().job, rank), own_ranks_.followers.contains(rank)});
  return peers;
}

std::vector<Link*> ReceiverSession::links() const {
  std::vector<Link*> links;
  for (const auto& link : links_)
    if (link->connection() != nullptr) links.push_back(link->connection());
  if (own_ranks_.leader) links.push_back(own_ranks_.leader.get());
  for (const auto& [rank, follower] : own_ranks_.followers) links.push_back(follower.get());
  return links;
}

std::vector<Link*> ReceiverSession::awaited_links() const {
  const bool pulls = phase_ == Phase::kPulling || phase_ == Phase::kFailing;
  std::vector<Link*> links;
  if (phase_ == Phase::kCopying) return links;
  if (phase_ != Phase::kVoting)
    for (const auto& link : links_)
      if (!pulls || link->busy()) links.push_back(link->connection());
  if (pulls) return links;
  if (own_ranks_.leader) links.push_back(own_ranks_.leader.get());
  for (const auto& [rank, follower] : own_ranks_.followers)
    if (election_.awaits(rank)) links.push_back(follower.get());
  return links;
}

void ReceiverSession::accept(Caller caller) {
  if (!leads() || caller.attach.purpose != Attach::Purpose::kControl)
    fail(ErrorCode::kMismatch, "{}: {} receives it and serves nothing"_message, describe(), identity().name());
  check_caller(caller, identity().job, setup_.view.own);
  const Rank rank = caller.hello.rank;
  const std::string name = caller.link->name();
  if (rank == 0 || own_ranks_.followers.contains(rank))
    fail(ErrorCode::kAlreadyExists, "{}: {} is attached already"_message, describe(), name);
  caller.link->set_handlers(
      [this, rank](Frame& frame) {
        switch (frame.type) {
          case kCode<Got>:
            return handle_got(rank, parse<Got>(frame.payload));
          case kCode<ProgressReport>:
            return handle_flow(parse<ProgressReport>(frame.payload));
          default:
            fail(ErrorCode::kMismatch, "unexpected message {}"_message, frame.type);
        }
      },
      [this](const Status& status) { break_session(status); },
      [this, name](const Detach& detach) { leave_with(detach, name); },
      [this](const Status& status) { break_session(status); });
  caller.link->watch_process(caller.hello.incarnation);
  caller.link->watch_worker(setup_.view.own[static_cast<size_t>(rank)].worker);
  caller.link->send(Prepared{});
  if (newest_ != 0) caller.link->send(Newest{.version = newest_});
  own_ranks_.followers.emplace(rank, std::move(caller.link));
  readiness_changed();
}

void ReceiverSession::adopt_leader(std::shared_ptr<Link> link) {
  own_ranks_.leader = std::move(link);
  own_ranks_.leader->set_handlers(
      [this](Frame& frame) { handle_leader(frame); }, [this](const Status& status) { break_session(status); },
      [this](const Detach& detach) { leave_with(detach, leader()); },
      [this](const Status& status) {
        sender_lost_ = true;  // possibly: it also reports own ranks, whose loss the senders see themselves
        break_session(status);
      });
  own_ranks_.leader->watch_process(setup_.view.own[0].incarnation);
  own_ranks_.leader->watch_worker(setup_.view.own[0].worker);
}

// A rank of this job has closed the batch.
void ReceiverSession::leave_with(const Detach& detach, const std::string& name) {
  if (!broken()) left_ = detach.status.ok();
  break_session(detach.reason(name));
}

void ReceiverSession::handle_leader(Frame& frame) {
  switch (frame.type) {
    case kCode<Prepared>:
      own_ranks_.leader_ready = true;
      return readiness_changed();
    case kCode<Newest>:
      newest_ = parse<Newest>(frame.payload).version;
      return owner_.on_newest(newest_);
    case kCode<Chosen>: {
      const Chosen chosen = parse<Chosen>(frame.payload);
      election_.hear(chosen);
      if (phase_ == Phase::kWaiting) begin(chosen);
      return;
    }
    case kCode<Decided>:
      return handle_decided(parse<Decided>(frame.payload));
    case kCode<ProgressReport>:
      return handle_flow(parse<ProgressReport>(frame.payload));
    default:
      fail(ErrorCode::kMismatch, "unexpected message {}"_message, frame.type);
  }
}

void ReceiverSession::on_pull_ready(PullLink& link) {
  share_ += link.share();
  if (link.streams()) setup_.on_allocation();
  readiness_changed();
}

// --- versions ------------------------------------------------------------------------------------

void ReceiverSession::on_withdrawn(PullLink& link, int64_t version) {
  const std::optional<Chosen>& chosen = election_.chosen();
  if (chosen && chosen->version == version && !link.pulled(version))
    election_.pass_up(failed(ErrorCode::kPeerLost, "{} has given up version {}"_message, link.name(), version));
}

void ReceiverSession::on_offer(PullLink&) {
  if (leads()) {
    if (const int64_t newest = election_.complete_version(); std::exchange(newest_, newest) != newest)
      own_ranks_.tell_followers(Newest{.version = newest});
    owner_.on_newest(newest_);
    if (phase_ == Phase::kWaiting) election_.choose();
    election_.tell_those_behind();
  }
  if (retires()) owner_.on_receiver_retired();
}

void ReceiverSession::recv(int64_t min_version) {
  phase_ = Phase::kWaiting;
  election_.want(min_version);
  if (leads())
    election_.choose();
  else if (election_.chosen())
    begin(*election_.chosen());
}

void ReceiverSession::on_held(PullLink&, bool held) {
  if (!election_.holding()) return;
  if (!held) {  // the sender has given the version up since: another one will follow
    election_.stop_holding();
    if (phase_ == Phase::kWaiting) election_.choose();
    return;
  }
  if (const std::optional<Chosen> chosen = election_.announce()) begin(*chosen);
}

void ReceiverSession::handle_got(Rank rank, const Got& got) {
  election_.note_got(rank, got, setup_.staged);
  if (phase_ == Phase::kWaiting) {
    election_.lower_min_version();
    return election_.choose();
  }
  if (!setup_.staged) return;
  if (phase_ == Phase::kVoting) return decision_.check_votes();
  if (phase_ == Phase::kPulling && !election_.refusal().ok()) fail_recv(election_.refusal());
}

void ReceiverSession::begin(const Chosen& chosen) {
  taking_ = chosen.version;
  election_.begin(chosen);
  failure_ = {};
  for (const auto& link : links_) link->forget_pulled();  // the version may have been taken before and sent again
  if (taking_ < election_.wanted())
    return refuse(failed(ErrorCode::kMismatch,
                         "{}: {} chose version {}, {} needs at least {}: recv is collective"_message, describe(),
                         rank_name(identity().job, 0), taking_, identity().name(), election_.wanted()));
  phase_ = Phase::kPulling;
  owner_.on_chosen(taking_);
  progress_seen_ = 0;
  // Each rank begins with a different source, so that they do not all read from the same one.
  to_take_.clear();
  for (size_t i = 0; i < links_.size(); ++i)
    to_take_.push_back(links_[(i + static_cast<size_t>(identity().rank)) % links_.size()].get());
  streams_busy_ = 0;
  leases_ = can_lease();
  if (progress_timer_ == 0)  // otherwise the last transfer's timer is still armed, and serves this one, too
    progress_timer_ = loop().add_timer_after(progress_period(), [this] { watch_progress(); });
  take_more();
  if (!broken_.ok() && needs_lost_sender()) fail_recv(broken_);
  if (links_.empty()) check_ended();  // this rank holds nothing that moves
}

// Tells that this rank does not begin the version: otherwise the senders and rank 0 would wait for it.
void ReceiverSession::refuse(const Status& why) {
  phase_ = Phase::kFailing;
  failure_ = why;
  for (const auto& link : links_) link->send_done(taking_, why);
  check_ended();
}

// --- pulling -------------------------------------------------------------------------------------

// Mapped and one-sided sources are all asked at once. A stream occupies a thread on each side while it is drained, so
// no more are asked than can be drained: otherwise two ranks could wait for each other's sources for ever.
void ReceiverSession::take_more() {
  const auto may_take = [&](const PullLink* link) {
    return !link->streams() || streams_busy_ < static_cast<size_t>(setup_.agent->threads());
  };
  while (phase_ == Phase::kPulling) {
    const auto next = std::ranges::find_if(to_take_, may_take);
    if (next == to_take_.end()) return;
    PullLink* link = *next;
    to_take_.erase(next);
    if (link->streams()) ++streams_busy_;
    link->take(taking_, election_.epoch(), leases_);
  }
}

void ReceiverSession::on_granted(PullLink& link) {
  if (link.bytes() != 0) owner_.on_writing();
}

void ReceiverSession::on_pulled(PullLink& link, const Status& status) {
  if (link.streams() && streams_busy_ > 0) --streams_busy_;
  if (status.ok()) setup_.on_moved(link.granted_bytes(), link.deltas());
  if (!status.ok()) {
    fail_recv(status);
  } else if (phase_ == Phase::kPulling) {
    take_more();
  }
  check_ended();
}

void ReceiverSession::check_ended() {
  if (phase_ == Phase::kIdle || phase_ == Phase::kWaiting) return;
  if (phase_ == Phase::kVoting || phase_ == Phase::kCopying) return;
  const auto busy = [](const auto& link) { return link->busy(); };
  if (std::ranges::any_of(links_, busy)) return;
  if (phase_ == Phase::kPulling &&
      !std::ranges::all_of(links_, [&](const auto& link) { return link->pulled(taking_); }))
    return;
  if (phase_ == Phase::kPulling && setup_.staged) return vote();
  // If a rank of this job has not got it, all take it again.
  if (phase_ == Phase::kPulling && election_.refusal().ok()) election_.took(taking_);
  const Status status = phase_ == Phase::kPulling ? Status() : failure_;
  tell_got(status);
  end_recv(status);
}

// To rank 0. If rank 0 itself has not got it, to all other ranks.
void ReceiverSession::tell_got(const Status& status) {
  if (!leads())
    election_.tell_got(taking_, status);
  else if (setup_.staged && !status.ok())
    own_ranks_.tell_followers(Decided{.version = taking_, .epoch = election_.epoch(), .reason = status});
}

void ReceiverSession::end_recv(const Status& status) {
  election_.stop_holding();
  phase_ = Phase::kIdle;
  owner_.on_recv_over(status);
  if (broken_.ok() || phase_ != Phase::kIdle) return;
  owner_.on_unavailable(broken_status());
  broadcast_broken();
  if (retires()) owner_.on_receiver_retired();
}

void ReceiverSession::end_wait(const Status& status) {
  end_recv(status);
}

void ReceiverSession::sum_digests(std::vector<Digest>& sums) const {
  sums.assign(setup_.tensors.size(), {});
  for (const auto& link : links_) link->add_digests(sums);
}

void ReceiverSession::fail_recv(const Status& status) {
  if (phase_ == Phase::kIdle || phase_ == Phase::kFailing) return;
  if (phase_ == Phase::kVoting || phase_ == Phase::kCopying) return;
  const bool waiting = phase_ == Phase::kWaiting;
  failure_ = Status(status.code(),
                    fmt::format("{}: {} while {} {}"_message, describe(), status.message(), identity().name(),
                                waiting ? "waited for a version" : fmt::format("received version {}", taking_)));
  if (waiting) {
    end_recv(failure_);
    return;
  }
  phase_ = Phase::kFailing;
  to_take_.clear();
  for (const auto& link : links_) {
    link->end_lease(status);
    if (link->busy())
      link->abort(status);
    else if (!link->pulled(taking_))
      link->send_done(taking_, status);  // otherwise the sender would wait for this rank
  }
  check_ended();
}

Duration ReceiverSession::progress_period() const {
  return std::min<Duration>(kProgressPeriod, setup_.stall / 4);
}

void ReceiverSession::watch_progress() {
  progress_timer_ = 0;
  if (phase_ == Phase::kPulling) {
    int64_t bytes = 0;
    for (const auto& link : links_) {
      bytes += link->bytes_done();
      link->send_progress();
    }
    if (std::exchange(progress_seen_, bytes) != bytes) {
      flowed_ = true;
      owner_.on_flow();
    }
  } else if (phase_ != Phase::kVoting) {
    return;
  }
  if (setup_.staged && std::exchange(flowed_, false)) tell_flow();
  progress_timer_ = loop().add_timer_after(progress_period(), [this] { watch_progress(); });
}

Status ReceiverSession::stalled() const {
  std::vector<std::string> names;
  for (const auto& link : links_)
    if (link->busy()) names.push_back(link->name());
  return failed(ErrorCode::kDeadlineExceeded, "no progress for {:.0f} s from {}"_message, to_seconds(setup_.stall),
                fmt::join(names, ", "));
}

std::string ReceiverSession::awaited() const {
  if (phase_ == Phase::kVoting && decision_.asked())
    return fmt::format("the store to say what becomes of version {}"_message, taking_);
  if (phase_ == Phase::kVoting && leads()) return fmt::format("the others to take version {}"_message, taking_);
  if (phase_ == Phase::kVoting)
    return fmt::format("{} to say what becomes of version {}"_message, rank_name(identity().job, 0), taking_);
  if (!leads() || !election_.all_have_announced()) return missing();
  return fmt::format("{} to offer version {}"_message, missing(), min_version());
}

Progress ReceiverSession::sample() const {
  Progress progress{.bytes_done = 0, .bytes_total = share_.bytes, .seconds = 0};
  for (const auto& link : links_) progress.bytes_done += link->bytes_done();
  return progress;
}

// --- losing peers --------------------------------------------------------------------------------

void ReceiverSession::on_pull_lost(PullLink&, const Status& status) {
  break_session(status);
}

void ReceiverSession::on_pull_broken(PullLink&, const Status& status) {
  break_session(status);
}

void ReceiverSession::on_pull_detached(PullLink&, const Status& reason) {
  sender_lost_ = true;
  break_session(reason);
}

void ReceiverSession::on_broken(const Status& latest) {
  if (phase_ == Phase::kVoting) {
    if (leads())
      decision_.check_votes();
    else if (!own_ranks_.leader->open())
      decision_.leader_lost();
    return;
  }
  if (may_go_on()) return;
  owner_.on_unavailable(broken_status());
  fail_recv(latest);
  broadcast_broken();
  if (retires()) owner_.on_receiver_retired();
}

// A version that was chosen can be taken as long as everything that it still needs is there: a sender may go once this
// rank is done with it, and a rank of this job that has the version may close.
bool ReceiverSession::may_go_on() const {
  if (phase_ == Phase::kVoting || phase_ == Phase::kCopying) return true;
  const bool takes = phase_ == Phase::kPulling || (phase_ == Phase::kIdle && election_.chosen());
  if (!takes || needs_lost_sender()) return false;
  // Staged, all ranks of the job are needed.
  const auto lost = [](const auto& follower) { return !follower.second->open(); };
  return !setup_.staged || (leads() ? std::ranges::none_of(own_ranks_.followers, lost) : own_ranks_.leader->open());
}

bool ReceiverSession::needs_lost_sender() const {
  const int64_t version = phase_ == Phase::kIdle ? election_.chosen()->version : taking_;
  return std::ranges::any_of(links_, [&](const auto& link) { return !link->open() && !link->pulled(version); });
}

void ReceiverSession::broadcast_broken() {
  if (std::exchange(broken_told_, true)) return;
  if (sender_lost_)
    for (const auto& link : links_) link->send_broken(broken_);
  own_ranks_.tell_followers(Broken{.status = broken_});
}

void ReceiverSession::detach_all(const Status& why) {
  loop().cancel_timer(progress_timer_);
  for (const auto& link : links_) link->detach(why);
  for (const auto& [rank, follower] : own_ranks_.followers) {
    if (!follower->open()) continue;
    follower->send(Detach{.status = why});
    follower->close();
  }
  if (own_ranks_.leader && own_ranks_.leader->open()) {
    own_ranks_.leader->send(Detach{.status = why});
    own_ranks_.leader->close();
  }
}

}  // namespace tessera::bus
