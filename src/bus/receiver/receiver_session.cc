#include "bus/receiver/receiver_session.h"

#include <algorithm>

#include "base/fail.h"
#include "bus/receiver/receiver_batch.h"
#include "bus/receiver/wanted_routes.h"

namespace tessera::bus {
namespace {

// Between reports while data flows.
Duration progress_period(const SessionSetup& setup) {
  return std::min<Duration>(seconds(0.5), setup.stall / 4);
}

}  // namespace

ReceiverSession::ReceiverSession(SessionSetup setup, ReceiverBatch& batch)
    : Session(std::move(setup)),
      batch_(batch),
      election_(identity(), links_, own_ranks_, setup_.agreement.floor),
      parts_{.setup = setup_,
             .name = describe(),
             .links = links_,
             .own_ranks = own_ranks_,
             .election = election_,
             .broken = broken_,
             .batch = batch_,
             .over = [this](const Status& status) { end_version(status); }} {}

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
  if (taken_ != nullptr) return taken_->awaited_links();
  std::vector<Link*> links;
  for (const auto& link : links_) links.push_back(link->connection());
  for (Link* link : election_.awaited_links()) links.push_back(link);
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
      return batch_.on_newest(newest_);
    case kCode<Chosen>: {
      const Chosen chosen = parse<Chosen>(frame.payload);
      election_.hear(chosen);
      if (waiting_) begin(chosen);
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
    batch_.on_newest(newest_);
    if (waiting_) election_.choose();
    election_.tell_those_behind();
  }
  if (retires()) batch_.on_session_retired();
}

void ReceiverSession::recv(int64_t min_version) {
  waiting_ = true;
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
    if (waiting_) election_.choose();
    return;
  }
  if (const std::optional<Chosen> chosen = election_.announce()) begin(*chosen);
}

void ReceiverSession::handle_got(Rank rank, const Got& got) {
  election_.note_got(rank, got);
  if (taken_ != nullptr) return taken_->hear_got();
  if (!waiting_) return;
  election_.lower_min_version();
  election_.choose();
}

void ReceiverSession::handle_decided(const Decided& decided) {
  const bool aborts = decided.verdict == Decided::Verdict::kAbort;
  if (election_.chosen() && election_.chosen()->epoch == decided.epoch && aborts)
    return election_.pass_up(decided.reason);  // another rank failed before this one began
  if (taken_ != nullptr && taken_->epoch() == decided.epoch) taken_->hear(decided);
}

void ReceiverSession::decided(uint32_t epoch, Decided::Verdict verdict, const Status& reason) {
  if (taken_ != nullptr && taken_->epoch() == epoch) taken_->decided(verdict, reason);
}

void ReceiverSession::handle_flow(const ProgressReport& report) {
  if (taken_ != nullptr) taken_->hear(report);
}

// --- the version under way -----------------------------------------------------------------------

void ReceiverSession::begin(Chosen chosen) {
  waiting_ = false;
  election_.begin(chosen);
  for (const auto& link : links_) link->forget_pulled();  // the version may have been taken before and sent again
  if (chosen.version < election_.wanted()) {
    // Tells that this rank does not begin the version: otherwise the senders and rank 0 would wait for it.
    const Status why =
        failed(ErrorCode::kMismatch, "{}: {} chose version {}, {} needs at least {}: recv is collective"_message,
               describe(), rank_name(identity().job, 0), chosen.version, identity().name(), election_.wanted());
    for (const auto& link : links_) link->send_done(chosen.version, why);
    election_.tell_got(chosen.version, why);
    return end_wait(why);
  }
  taken_ = &make_version(chosen);
  if (progress_timer_ == 0)  // otherwise the last transfer's timer is still armed, and serves this one, too
    progress_timer_ = loop().add_timer_after(progress_period(setup_), [this] { watch_progress(); });
  taken_->begin();
}

TakenVersion& ReceiverSession::make_version(const Chosen& chosen) {
  if (!setup_.staged) return version_.emplace<InPlaceVersion>(parts_, chosen);
  // A version that is only staged may be committed long after the senders have gone.
  const auto direct = [](const auto& link) { return link->direct(); };
  if (!links_.empty() && std::ranges::all_of(links_, direct) && batch_.commits_at_once())
    return version_.emplace<LeasedVersion>(parts_, chosen);
  return version_.emplace<StagedVersion>(parts_, chosen);
}

void ReceiverSession::on_granted(PullLink& link) {
  if (taken_ != nullptr) taken_->granted(link);
}

void ReceiverSession::on_pulled(PullLink& link, const Status& status) {
  if (taken_ != nullptr) taken_->pulled(link, status);
}

void ReceiverSession::on_copied(PullLink&) {
  if (taken_ != nullptr) taken_->copied();
}

void ReceiverSession::end_version(const Status& status) {
  batch_.on_version_over(*std::exchange(taken_, nullptr), status);
  check_over();
}

void ReceiverSession::end_wait(const Status& status) {
  waiting_ = false;
  election_.stop_holding();
  batch_.on_wait_over(status);
  check_over();
}

void ReceiverSession::fail_recv(const Status& status) {
  if (taken_ != nullptr) return taken_->fail(status);
  if (waiting_)
    end_wait(Status(status.code(), fmt::format("{}: {} while {} waited for a version"_message, describe(),
                                               status.message(), identity().name())));
}

void ReceiverSession::expire() {
  if (taken_ != nullptr) taken_->expire();
}

void ReceiverSession::sum_digests(std::vector<Digest>& sums) const {
  sums.assign(setup_.tensors.size(), {});
  for (const auto& link : links_) link->add_digests(sums);
}

void ReceiverSession::watch_progress() {
  const bool lasts = taken_ != nullptr && taken_->report_progress();
  progress_timer_ = lasts ? loop().add_timer_after(progress_period(setup_), [this] { watch_progress(); }) : 0;
}

std::string ReceiverSession::awaited() const {
  if (taken_ != nullptr) return taken_->awaited();
  if (!waiting_) return {};
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
  const bool goes_on = may_go_on();
  if (taken_ != nullptr) taken_->peer_lost();
  if (goes_on) return;
  batch_.on_unavailable(broken_status());
  fail_recv(latest);
  broadcast_broken();
  if (retires()) batch_.on_session_retired();
}

// Reports a loss that came while a version was under way, once that is over.
void ReceiverSession::check_over() {
  if (broken_.ok() || busy()) return;
  batch_.on_unavailable(broken_status());
  broadcast_broken();
  if (retires()) batch_.on_session_retired();
}

bool ReceiverSession::may_go_on() const {
  if (taken_ != nullptr) return taken_->may_go_on();
  return !waiting_ && election_.chosen() && parts_.can_take(election_.chosen()->version);
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
