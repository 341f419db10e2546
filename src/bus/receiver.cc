#include "bus/receiver.h"

#include <algorithm>

#include "base/fail.h"
#include "base/log.h"

namespace tessera::bus {
namespace {

constexpr Duration kProgressPeriod = seconds(0.5);  // while data flows

}  // namespace

ReceiverBatch::ReceiverBatch(BatchSetup setup) : BatchImpl(std::move(setup)) {}

ReceiverBatch::~ReceiverBatch() = default;

// --- attaching
// --------------------------------------------------------------------------------------------------------

std::vector<Wanted> ReceiverBatch::wanted_from(Rank rank, std::span<const uint32_t> ties) const {
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
    one.per_route = matched.src.has_partial();
    one.skipped = ties[route.tensor] != route.tensor;
    wanted.push_back(std::move(one));
  }
  return wanted;
}

void ReceiverBatch::connect() {
  const std::vector<uint32_t> ties = find_ties(setup_.tensors);
  for (Rank rank = 0; rank < static_cast<Rank>(setup_.view.peer.size()); ++rank) {
    const RankRecord& record = setup_.view.peer[static_cast<size_t>(rank)];
    links_.push_back(std::make_unique<PullLink>(
        *setup_.agent, *this, setup_.view.peer_job, rank, record, wanted_from(rank, ties),
        PullLinkOptions{.attach = attach_message(Attach::Purpose::kPull),
                        .digest = setup_.agreement.digest,
                        .tensor_name = [this](uint32_t tensor) { return tensor_name(tensor); }}));
    PullLink* link = links_.back().get();
    calls_.push_back({link->name(), record, [link](std::shared_ptr<Link> made) { link->adopt(std::move(made)); }});
  }
  if (!leads())
    calls_.push_back({rank_name(identity().job, 0), setup_.view.own[0],
                      [this](std::shared_ptr<Link> link) { adopt_leader(std::move(link)); }});
}

std::vector<std::string> ReceiverBatch::unready() const {
  std::vector<std::string> names;
  for (const auto& link : links_)
    if (!link->ready()) names.push_back(link->name());
  if (!leads() && !leader_ready_) names.push_back(rank_name(identity().job, 0));
  if (leads())
    for (Rank rank = 1; rank < identity().world; ++rank)
      if (!followers_.contains(rank)) names.push_back(rank_name(identity().job, rank));
  return names;
}

void ReceiverBatch::accept(Caller caller) {
  if (!leads() || caller.attach.purpose != Attach::Purpose::kControl)
    fail(ErrorCode::kMismatch, "{}: {} receives it and serves nothing", describe(), identity().name());
  check_caller(caller, identity().job, setup_.view.own);
  const Rank rank = caller.hello.rank;
  const std::string name = caller.link->name();
  if (rank == 0 || followers_.contains(rank))
    fail(ErrorCode::kAlreadyExists, "{}: {} is attached already", describe(), name);
  caller.link->set_handlers(
      [this, name, rank](Frame& frame) {
        switch (static_cast<MessageType>(frame.type)) {
          case MessageType::kDetach:
            followers_.at(rank)->close();
            return break_batch(parse<Detach>(frame.payload).reason(name));
          case MessageType::kBroken:
            return break_batch(parse<Broken>(frame.payload).status);
          default:
            fail(ErrorCode::kMismatch, "unexpected message {}", frame.type);
        }
      },
      [this, name](const Status& status) { lose_fellow(name, status); });
  caller.link->watch_process(caller.hello.incarnation);
  caller.link->send(Prepared{});
  followers_.emplace(rank, std::move(caller.link));
  readiness_changed();
}

void ReceiverBatch::adopt_leader(std::shared_ptr<Link> link) {
  leader_ = std::move(link);
  const std::string name = leader_->name();
  leader_->set_handlers([this](Frame& frame) { handle_leader(frame); },
                        [this, name](const Status& status) { lose_fellow(name, status); });
  leader_->watch_process(setup_.view.own[0].incarnation);
}

void ReceiverBatch::handle_leader(Frame& frame) {
  if (!leader_welcomed_) {
    setup_.agent->check_welcome(frame, leader_->name());
    leader_welcomed_ = true;
    leader_->set_limits({.payload_bytes = kMaxMessageBytes, .fds = 0});
    leader_->send(attach_message(Attach::Purpose::kControl));
    return;
  }
  switch (static_cast<MessageType>(frame.type)) {
    case MessageType::kPrepared:
      leader_ready_ = true;
      return readiness_changed();
    case MessageType::kChosen: {
      const Chosen chosen = parse<Chosen>(frame.payload);
      if (chosen.version <= version_.load() || chosen.epoch <= epoch_ || (chosen_ && chosen.epoch <= chosen_->epoch))
        fail(ErrorCode::kMismatch, "Chosen of version {} in epoch {} out of turn", chosen.version, chosen.epoch);
      chosen_ = chosen;
      if (phase_ == Phase::kWaiting) begin(chosen);
      return;
    }
    case MessageType::kDetach:
      leader_->close();
      return break_batch(parse<Detach>(frame.payload).reason(rank_name(identity().job, 0)));
    case MessageType::kBroken:
      sender_lost_ = true;  // perhaps: it tells of fellows, too, whom the senders see for themselves
      return break_batch(parse<Broken>(frame.payload).status);
    default:
      fail(ErrorCode::kMismatch, "unexpected message {}", frame.type);
  }
}

void ReceiverBatch::on_pull_ready(PullLink& link) {
  rank_bytes_ += link.bytes();
  if (link.rings()) ++allocations_;
  readiness_changed();
}

// --- versions
// ---------------------------------------------------------------------------------------------------------

int64_t ReceiverBatch::complete_version() const {
  const int64_t version = links_.front()->offered();
  const bool complete =
      std::ranges::all_of(links_, [&](const auto& link) { return link->open() && link->offered() == version; });
  return complete ? version : 0;
}

void ReceiverBatch::on_offer(PullLink& link) {
  if (link.offered() == 0) chosen_.reset();  // withdrawn before this rank took it
  const int64_t complete = complete_version();
  {
    const std::lock_guard lock(mutex_);
    newest_ = complete;
  }
  changed_.notify_all();
  if (!broken_.ok() && !may_go_on()) end_waits();
  if (phase_ == Phase::kWaiting && leads()) choose();
}

int64_t ReceiverBatch::wait_version(int64_t version, Timeout timeout) {
  process_.require(identity().name());
  std::unique_lock lock(mutex_);
  const auto ready = [&] { return newest_.load() >= version || !lost_.ok(); };
  if (!changed_.wait_for(lock, setup_.stop, timeout, ready)) {
    if (setup_.stop.stop_requested())
      fail(ErrorCode::kCancelled, "{}: the wait of {} for version {} was interrupted", describe(), identity().name(),
           version);
    fail(ErrorCode::kDeadlineExceeded, "{}: {} waited {:.1f} s for version {}; the newest on offer is {}", describe(),
         identity().name(), to_seconds(timeout), version, newest_.load());
  }
  if (newest_.load() < version) lost_.throw_if_error();
  return newest_.load();
}

std::shared_ptr<Operation> ReceiverBatch::recv(std::optional<int64_t> min_version, Timeout timeout) {
  std::shared_ptr<Operation> operation;
  setup_.agent->run_on_loop([&] {
    operation = begin_operation("recv", timeout, chosen_.has_value());
    phase_ = Phase::kWaiting;
    min_version_ = std::max(min_version.value_or(0), version_.load() + 1);
    if (leads())
      choose();
    else if (chosen_)
      begin(*chosen_);
  });
  return operation;
}

void ReceiverBatch::choose() {
  const int64_t version = complete_version();
  if (version < min_version_) return;
  const Chosen chosen{.version = version, .epoch = epoch_ + 1};
  for (const auto& [rank, follower] : followers_) follower->send(chosen);
  begin(chosen);
}

void ReceiverBatch::begin(const Chosen& chosen) {
  chosen_.reset();
  epoch_ = chosen.epoch;
  if (chosen.version < min_version_) {
    phase_ = Phase::kIdle;
    end_operation(failed(ErrorCode::kMismatch, "{}: {} chose version {}, {} wants at least {}: recv is collective",
                         describe(), rank_name(identity().job, 0), chosen.version, identity().name(), min_version_));
    if (!broken_.ok()) end_waits();
    return;
  }
  phase_ = Phase::kPulling;
  taking_ = chosen.version;
  failure_ = {};
  operation_->set_version(taking_);
  data_start_ = Clock::steady().now();
  progress_seen_ = 0;
  // Each rank begins with another source, so that they do not all read from one.
  to_take_.clear();
  for (size_t i = 0; i < links_.size(); ++i)
    to_take_.push_back(links_[(i + static_cast<size_t>(identity().rank)) % links_.size()].get());
  rings_busy_ = 0;
  set_deadline(Deadline::after(setup_.stall));
  if (progress_timer_ == 0)  // else the last transfer's is still to come: it serves this one as well
    progress_timer_ = loop().add_timer_after(progress_period(), [this] { watch_progress(); });
  take_more();
  if (!broken_.ok() && needs_lost_sender()) fail_operation(broken_);
}

// --- pulling
// ----------------------------------------------------------------------------------------------------------

// Mapped and one-sided sources are asked all at once. A ring occupies a thread here and one there while it is drained,
// so no more are asked than can be drained: otherwise two ranks could wait for each other's sources for ever.
void ReceiverBatch::take_more() {
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

void ReceiverBatch::on_granted(PullLink& link) {
  if (link.bytes() != 0) torn_ = true;
}

void ReceiverBatch::on_pulled(PullLink& link, const Status& status) {
  if (link.rings() && rings_busy_ > 0) --rings_busy_;
  if (!status.ok()) {
    fail_operation(status);
  } else if (phase_ == Phase::kPulling) {
    take_more();
  }
  check_ended();
}

void ReceiverBatch::check_ended() {
  if (phase_ == Phase::kIdle || phase_ == Phase::kWaiting) return;
  const auto busy = [](const auto& link) { return link->busy(); };
  if (std::ranges::any_of(links_, busy)) return;
  if (phase_ == Phase::kPulling &&
      !std::ranges::all_of(links_, [&](const auto& link) { return link->pulled(taking_); }))
    return;
  const bool good = phase_ == Phase::kPulling;
  phase_ = Phase::kIdle;
  if (good) {
    sums_.assign(setup_.tensors.size(), {});
    for (const auto& link : links_) link->add_digests(sums_);
    const std::lock_guard lock(mutex_);
    digests_.swap(sums_);
    version_ = taking_;
    torn_ = false;
    newest_ = complete_version();
  }
  end_operation(good ? Status() : failure_);
  if (broken_.ok()) return;
  end_waits();
  broadcast_broken();
}

void ReceiverBatch::fail_operation(const Status& status) {
  if (phase_ == Phase::kIdle || phase_ == Phase::kFailing) return;
  const bool waiting = phase_ == Phase::kWaiting;
  failure_ = Status(status.code(),
                    fmt::format("{}: {} while {} {}", describe(), status.message(), identity().name(),
                                waiting ? "waited for a version" : fmt::format("received version {}", taking_)));
  if (waiting) {
    phase_ = Phase::kIdle;
    end_operation(failure_);
    return;
  }
  phase_ = Phase::kFailing;
  to_take_.clear();
  for (const auto& link : links_) {
    if (link->busy())
      link->abort(status);
    else if (!link->pulled(taking_))
      link->send_done(taking_, status);  // it would wait for this rank otherwise
  }
  check_ended();
}

Duration ReceiverBatch::progress_period() const {
  return std::min<Duration>(kProgressPeriod, setup_.stall / 4);
}

void ReceiverBatch::watch_progress() {
  progress_timer_ = 0;
  if (phase_ != Phase::kPulling) return;
  int64_t bytes = 0;
  for (const auto& link : links_) {
    bytes += link->bytes_done();
    link->send_progress();
  }
  if (bytes != progress_seen_) {
    progress_seen_ = bytes;
    set_deadline(Deadline::after(setup_.stall));
  }
  progress_timer_ = loop().add_timer_after(progress_period(), [this] { watch_progress(); });
}

void ReceiverBatch::on_deadline() {
  if (phase_ == Phase::kWaiting) {
    const std::string missing = leads() ? who_has_not_offered() : rank_name(identity().job, 0) + " to choose a version";
    phase_ = Phase::kIdle;
    end_operation(failed(ErrorCode::kDeadlineExceeded, "{}: {} waited {:.1f} s for version {} or newer: missing {}",
                         describe(), identity().name(), to_seconds(Clock::steady().now() - operation_start_),
                         min_version_, missing));
    return;
  }
  std::vector<std::string> names;
  for (const auto& link : links_)
    if (link->busy()) names.push_back(link->name());
  fail_operation(failed(ErrorCode::kDeadlineExceeded, "no progress for {:.0f} s from {}", to_seconds(setup_.stall),
                        fmt::join(names, ", ")));
}

std::string ReceiverBatch::who_has_not_offered() const {
  std::vector<std::string> names;
  for (const auto& link : links_)
    if (link->offered() < min_version_)
      names.push_back(link->offered() == 0 ? link->name()
                                           : fmt::format("{} (offers {})", link->name(), link->offered()));
  if (names.empty())
    for (const auto& link : links_) names.push_back(fmt::format("{} (offers {})", link->name(), link->offered()));
  return fmt::format("{}", fmt::join(names, ", "));
}

bool ReceiverBatch::cancel_operation() {
  if (phase_ != Phase::kWaiting) return false;
  phase_ = Phase::kIdle;
  end_operation(failed(ErrorCode::kCancelled, "{}: the recv of {} was cancelled", describe(), identity().name()));
  return true;
}

Progress ReceiverBatch::sample() const {
  Progress progress{.bytes_done = 0, .bytes_total = rank_bytes_.load(), .seconds = 0};
  for (const auto& link : links_) progress.bytes_done += link->bytes_done();
  progress.seconds = seconds_of_data();
  return progress;
}

// --- losing peers
// -----------------------------------------------------------------------------------------------------

void ReceiverBatch::on_pull_lost(PullLink&, const Status& status) {
  break_batch(status);
}

void ReceiverBatch::on_pull_broken(PullLink&, const Status& status) {
  break_batch(status);
}

void ReceiverBatch::on_pull_detached(PullLink&, const Status& reason) {
  sender_lost_ = true;
  break_batch(reason);
}

void ReceiverBatch::lose_fellow(const std::string&, const Status& status) {
  break_batch(status);
}

void ReceiverBatch::on_broken(const Status& latest) {
  if (may_go_on()) return;
  end_waits();
  fail_operation(latest);
  broadcast_broken();
}

// A version that was chosen can be taken as long as all that it still needs is there: a sender may well go once this
// rank is done with it, and a fellow that has it may close.
bool ReceiverBatch::may_go_on() const {
  const bool takes = phase_ == Phase::kPulling || (phase_ == Phase::kIdle && chosen_);
  return takes && !needs_lost_sender();
}

// No version will come any more.
void ReceiverBatch::end_waits() {
  {
    const std::lock_guard lock(mutex_);
    newest_ = 0;
    if (lost_.ok()) lost_ = broken_status();
  }
  changed_.notify_all();
}

bool ReceiverBatch::needs_lost_sender() const {
  const int64_t version = phase_ == Phase::kIdle ? chosen_->version : taking_;
  return std::ranges::any_of(links_, [&](const auto& link) { return !link->open() && !link->pulled(version); });
}

void ReceiverBatch::broadcast_broken() {
  if (std::exchange(broken_told_, true)) return;
  if (sender_lost_)
    for (const auto& link : links_) link->send_broken(broken_);
  for (const auto& [rank, follower] : followers_)
    if (follower->open()) follower->send(Broken{.status = broken_});
}

void ReceiverBatch::detach_all(const Status& why) {
  loop().cancel_timer(progress_timer_);
  for (const auto& link : links_) link->detach(why);
  for (const auto& [rank, follower] : followers_) {
    if (!follower->open()) continue;
    follower->send(Detach{.status = why});
    follower->close();
  }
  if (leader_ && leader_->open()) {
    leader_->send(Detach{.status = why});
    leader_->close();
  }
}

}  // namespace tessera::bus
