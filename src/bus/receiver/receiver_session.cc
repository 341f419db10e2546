#include "bus/receiver/receiver_session.h"

#include <algorithm>

#include "base/fail.h"

namespace tessera::bus {
ReceiverSession::ReceiverSession(SessionSetup setup, ReceiverSessionOwner& owner)
    : Session(std::move(setup)), owner_(owner), got_(setup_.view.own.size(), 0), floor_(setup_.agreement.floor) {}

ReceiverSession::~ReceiverSession() = default;

// --- attaching -----------------------------------------------------------------------------------

std::vector<Wanted> ReceiverSession::wanted_from(Rank rank, std::span<const uint32_t> ties) const {
  const std::vector<LinkRoute>& routes = setup_.routes.by_peer[static_cast<size_t>(rank)];
  std::vector<Wanted> wanted;
  wanted.reserve(routes.size());
  for (const LinkRoute& route : routes) {
    const Match::Tensor& matched = setup_.agreement.match.tensors[route.tensor];
    const LocalTensor& local = setup_.tensors[route.tensor];
    Wanted one;
    one.route.what = {
        .tensor = route.tensor, .shape = matched.shape, .dtype = matched.src_dtype, .region = route.region};
    one.route.src.owned = route.src_owned;
    one.route.dst = local.array;
    one.route.dst_dtype = local.dtype;
    one.route.data = local.data;
    one.per_route = matched.src.has_partial() || setup_.agreement.delta;
    one.skipped = ties[route.tensor] != route.tensor;
    if (matched.wire) {
      one.route.wire = std::make_shared<WirePiece>(wire_region(matched, route.region));
      one.route.what = piece_region(route.tensor, *one.route.wire);
      one.route.src.owned = one.route.what.region;
      one.route.planes = local.planes;
      if (!local.planes.empty()) one.route.dst = {.owned = local.held, .strides = {}};
      one.per_route = true;
    }
    wanted.push_back(std::move(one));
  }
  return wanted;
}

void ReceiverSession::connect() {
  const std::vector<uint32_t> ties = find_ties(setup_.tensors);
  for (Rank rank = 0; rank < static_cast<Rank>(setup_.view.peer.size()); ++rank) {
    const RankRecord& record = setup_.view.peer[static_cast<size_t>(rank)];
    links_.push_back(std::make_unique<PullLink>(
        *setup_.agent, *this, setup_.view.peer_job, rank, record, wanted_from(rank, ties),
        PullLinkOptions{.digest = setup_.agreement.digest,
                        .tensor_name = [this](uint32_t tensor) { return tensor_name(tensor); },
                        .lent = setup_.lent,
                        .delta = setup_.agreement.delta}));
    PullLink* link = links_.back().get();
    calls_.push_back({link->name(), record, Attach::Purpose::kPull,
                      [link](std::shared_ptr<Link> made) { link->adopt(std::move(made)); }});
  }
  if (!leads())
    calls_.push_back({rank_name(identity().job, 0), setup_.view.own[0], Attach::Purpose::kControl,
                      [this](std::shared_ptr<Link> link) { adopt_leader(std::move(link)); }});
}

std::vector<Session::Linked> ReceiverSession::linked() const {
  std::vector<Linked> peers;
  for (const auto& link : links_) peers.push_back({link->name(), link->ready()});
  if (!leads()) {
    peers.push_back({rank_name(identity().job, 0), leader_ready_});
    return peers;
  }
  for (Rank rank = 1; rank < identity().world; ++rank)
    peers.push_back({rank_name(identity().job, rank), followers_.contains(rank)});
  return peers;
}

std::vector<Link*> ReceiverSession::awaited_links() const {
  const bool pulls = phase_ == Phase::kPulling || phase_ == Phase::kFailing;
  std::vector<Link*> links;
  if (phase_ != Phase::kVoting)
    for (const auto& link : links_)
      if (!pulls || link->busy()) links.push_back(link->connection());
  if (pulls) return links;
  if (leader_) links.push_back(leader_.get());
  for (const auto& [rank, follower] : followers_)
    if (got_[static_cast<size_t>(rank)] < announced_) links.push_back(follower.get());
  return links;
}

void ReceiverSession::accept(Caller caller) {
  if (!leads() || caller.attach.purpose != Attach::Purpose::kControl)
    fail(ErrorCode::kMismatch, "{}: {} receives it and serves nothing", describe(), identity().name());
  check_caller(caller, identity().job, setup_.view.own);
  const Rank rank = caller.hello.rank;
  const std::string name = caller.link->name();
  if (rank == 0 || followers_.contains(rank))
    fail(ErrorCode::kAlreadyExists, "{}: {} is attached already", describe(), name);
  caller.link->set_handlers(
      [this, rank](Frame& frame) {
        switch (frame.type) {
          case kCode<Got>:
            return handle_got(rank, parse<Got>(frame.payload));
          case kCode<ProgressReport>:
            return handle_flow(parse<ProgressReport>(frame.payload));
          default:
            fail(ErrorCode::kMismatch, "unexpected message {}", frame.type);
        }
      },
      [this](const Status& status) { break_session(status); },
      [this, name](const Detach& detach) { break_session(detach.reason(name)); },
      [this](const Status& status) { break_session(status); });
  caller.link->watch_process(caller.hello.incarnation);
  caller.link->watch_worker(setup_.view.own[static_cast<size_t>(rank)].worker);
  caller.link->send(Prepared{});
  followers_.emplace(rank, std::move(caller.link));
  readiness_changed();
}

void ReceiverSession::adopt_leader(std::shared_ptr<Link> link) {
  leader_ = std::move(link);
  leader_->set_handlers([this](Frame& frame) { handle_leader(frame); },
                        [this](const Status& status) { break_session(status); },
                        [this](const Detach& detach) { break_session(detach.reason(rank_name(identity().job, 0))); },
                        [this](const Status& status) {
                          sender_lost_ = true;  // perhaps: it tells of own ranks, too, whom the senders see themselves
                          break_session(status);
                        });
  leader_->watch_process(setup_.view.own[0].incarnation);
  leader_->watch_worker(setup_.view.own[0].worker);
}

void ReceiverSession::handle_leader(Frame& frame) {
  switch (frame.type) {
    case kCode<Prepared>:
      leader_ready_ = true;
      return readiness_changed();
    case kCode<Chosen>: {
      const Chosen chosen = parse<Chosen>(frame.payload);
      if (chosen.version < floor_ || chosen.epoch <= epoch_ || (chosen_ && chosen.epoch <= chosen_->epoch))
        fail(ErrorCode::kMismatch, "Chosen of version {} in epoch {} out of turn", chosen.version, chosen.epoch);
      chosen_ = chosen;
      if (phase_ == Phase::kWaiting) begin(chosen);
      return;
    }
    case kCode<Decided>:
      return handle_decided(parse<Decided>(frame.payload));
    case kCode<ProgressReport>:
      return handle_flow(parse<ProgressReport>(frame.payload));
    default:
      fail(ErrorCode::kMismatch, "unexpected message {}", frame.type);
  }
}

void ReceiverSession::on_pull_ready(PullLink& link) {
  share_ += link.share();
  if (link.rings()) setup_.on_allocation();
  readiness_changed();
}

// --- versions ------------------------------------------------------------------------------------

int64_t ReceiverSession::complete_version() const {
  for (int64_t version = links_.front()->offered(); version != 0;) {
    int64_t lower = version;  // the newest that the one which lacks it offers instead
    for (const auto& link : links_) {
      if (!link->open()) return 0;
      if (!link->offers(version)) lower = std::min(lower, link->newest_below(version));
    }
    if (lower == version) return version;
    version = lower;
  }
  return 0;
}

void ReceiverSession::on_withdrawn(PullLink& link, int64_t version) {
  if (chosen_ && chosen_->version == version && !link.pulled(version))
    pass_up(failed(ErrorCode::kPeerLost, "{} has given up version {}", link.name(), version));
}

// Rank 0 chooses no other one before it has heard.
void ReceiverSession::pass_up(const Status& why) {
  const Chosen chosen = *std::exchange(chosen_, std::nullopt);
  epoch_ = chosen.epoch;
  if (leader_->open()) leader_->send(Got{.version = chosen.version, .epoch = chosen.epoch, .reason = why});
}

void ReceiverSession::on_offer(PullLink&) {
  owner_.on_newest(complete_version());
  if (phase_ == Phase::kWaiting && leads()) choose();
  if (retires()) owner_.on_receiver_retired();
}

void ReceiverSession::recv(int64_t min_version) {
  phase_ = Phase::kWaiting;
  wanted_ = min_version;
  min_version_ = std::max(min_version, floor_ + 1);
  if (leads())
    choose();
  else if (chosen_)
    begin(*chosen_);
}

bool ReceiverSession::own_ranks_have(uint32_t epoch) const {
  for (size_t rank = 1; rank < got_.size(); ++rank)
    if (got_[rank] < epoch) return false;
  return true;
}

void ReceiverSession::choose() {
  const int64_t version = complete_version();
  if (holding_ != 0 || version < min_version_ || !own_ranks_have(announced_)) return;
  holding_ = version;
  ++epoch_;
  for (const auto& link : links_) link->hold(version, epoch_);
}

void ReceiverSession::on_held(PullLink&, bool held) {
  if (holding_ == 0) return;
  if (!held) {  // one has given it up since: another one will come
    stop_holding();
    if (phase_ == Phase::kWaiting) choose();
    return;
  }
  if (!std::ranges::all_of(links_, [](const auto& link) { return link->holds(); })) return;
  const Chosen chosen{.version = std::exchange(holding_, 0), .epoch = epoch_};
  announced_ = epoch_;
  floor_before_ = floor_;
  vote_ = {};
  for (const auto& [rank, follower] : followers_)
    if (follower->open()) follower->send(chosen);
  begin(chosen);
}

void ReceiverSession::stop_holding() {
  if (std::exchange(holding_, 0) == 0) return;
  for (const auto& link : links_) link->release();
}

void ReceiverSession::handle_got(Rank rank, const Got& got) {
  if (got.epoch != announced_ || got_[static_cast<size_t>(rank)] >= got.epoch)
    fail(ErrorCode::kMismatch, "Got of epoch {} where {} was announced", got.epoch, announced_);
  got_[static_cast<size_t>(rank)] = got.epoch;
  if (!got.reason.ok() && vote_.ok())
    vote_ = Status(got.reason.code(), fmt::format("{}: {}", rank_name(identity().job, rank), got.reason.message()));
  // In place, this rank may have it and that one not: it may be sent again, and is taken again by all.
  if (!setup_.staged && !got.reason.ok()) floor_ = std::min(floor_, floor_before_);
  if (phase_ == Phase::kWaiting) {
    min_version_ = std::max(wanted_, floor_ + 1);
    return choose();
  }
  if (!setup_.staged) return;
  if (phase_ == Phase::kVoting) return check_votes();
  if (phase_ == Phase::kPulling && !vote_.ok()) fail_recv(vote_);
}

void ReceiverSession::begin(const Chosen& chosen) {
  chosen_.reset();
  epoch_ = chosen.epoch;
  taking_ = chosen.version;
  failure_ = {};
  for (const auto& link : links_) link->forget_pulled();  // it may be one that was taken before, sent again
  if (chosen.version < wanted_)
    return refuse(failed(ErrorCode::kMismatch, "{}: {} chose version {}, {} wants at least {}: recv is collective",
                         describe(), rank_name(identity().job, 0), chosen.version, identity().name(), wanted_));
  phase_ = Phase::kPulling;
  owner_.on_chosen(taking_);
  progress_seen_ = 0;
  // Each rank begins with another source, so that they do not all read from one.
  to_take_.clear();
  for (size_t i = 0; i < links_.size(); ++i)
    to_take_.push_back(links_[(i + static_cast<size_t>(identity().rank)) % links_.size()].get());
  rings_busy_ = 0;
  if (progress_timer_ == 0)  // else the last transfer's is still to come: it serves this one as well
    progress_timer_ = loop().add_timer_after(progress_period(), [this] { watch_progress(); });
  take_more();
  if (!broken_.ok() && needs_lost_sender()) fail_recv(broken_);
}

// Of a version that is not begun: the senders and rank 0 would wait for this rank.
void ReceiverSession::refuse(const Status& why) {
  phase_ = Phase::kFailing;
  failure_ = why;
  for (const auto& link : links_) link->send_done(taking_, why);
  check_ended();
}

// --- pulling -------------------------------------------------------------------------------------

// Mapped and one-sided sources are asked all at once. A ring occupies a thread here and one there while it is drained,
// so no more are asked than can be drained: otherwise two ranks could wait for each other's sources for ever.
void ReceiverSession::take_more() {
  const auto may_take = [&](const PullLink* link) {
    return !link->rings() || rings_busy_ < static_cast<size_t>(setup_.agent->threads());
  };
  while (phase_ == Phase::kPulling) {
    const auto next = std::ranges::find_if(to_take_, may_take);
    if (next == to_take_.end()) return;
    PullLink* link = *next;
    to_take_.erase(next);
    if (link->rings()) ++rings_busy_;
    link->take(taking_, epoch_);
  }
}

void ReceiverSession::on_granted(PullLink& link) {
  if (link.bytes() != 0) owner_.on_writing();
}

void ReceiverSession::on_pulled(PullLink& link, const Status& status) {
  if (link.rings() && rings_busy_ > 0) --rings_busy_;
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
  if (phase_ == Phase::kVoting) return;
  const auto busy = [](const auto& link) { return link->busy(); };
  if (std::ranges::any_of(links_, busy)) return;
  if (phase_ == Phase::kPulling &&
      !std::ranges::all_of(links_, [&](const auto& link) { return link->pulled(taking_); }))
    return;
  if (phase_ == Phase::kPulling && setup_.staged) return vote();
  // Unless an own rank has not got it: then all take it again.
  if (phase_ == Phase::kPulling && vote_.ok()) floor_ = taking_;
  const Status status = phase_ == Phase::kPulling ? Status() : failure_;
  tell_got(status);
  end_recv(status);
}

// To rank 0, or from it to all where it is the one that has not got it.
void ReceiverSession::tell_got(const Status& status) {
  if (!leads()) {
    if (leader_->open()) leader_->send(Got{.version = taking_, .epoch = epoch_, .reason = status});
  } else if (setup_.staged && !status.ok()) {
    for (const auto& [rank, follower] : followers_)
      if (follower->open()) follower->send(Decided{.version = taking_, .epoch = epoch_, .reason = status});
  }
}

}  // namespace tessera::bus
