#include "bus/sender/sender_session.h"

#include <algorithm>

#include "base/fail.h"
#include "base/log.h"
#include "base/mutation.h"
#include "bus/sender/served_routes.h"

namespace tessera::bus {
namespace {

constexpr Duration kRevokeGrace = seconds(5);  // for receivers to stop reading

}  // namespace

SenderSession::SenderSession(SessionSetup setup, SenderSessionOwner& owner)
    : Session(std::move(setup)),
      owner_(owner),
      preparation_(setup_,
                   [this](const SentRoute& route, uint32_t slot) {
                     return sent_elements(setup_, preparation_.reducer(), route, slot).route;
                   },
                   {.ready_changed = [this] { attached_one(); },
                    .lost = [this](const Status& status) { break_session(status); },
                    .prepared = [this] { on_prepared(); },
                    .failed = [this](const Status& status) { fail_offer(status); },
                    .stopped = [this] { check_ended(); },
                    .ahead = [this](int64_t version) { owner_.on_ahead(version, true); }}),
      digests_(setup_, preparation_, [this](uint32_t slot) { on_digests(slot); }),
      on_offer_(setup_.slots, 0) {}

// --- attaching -----------------------------------------------------------------------------------

void SenderSession::connect() {
  if (preparation_.quantizer() && identity().rank != 0)
    calls_.push_back(
        {rank_name(identity().job, 0), setup_.view.own[0], Attach::Purpose::kAgree,
         [this](std::shared_ptr<Link> link) { preparation_.quantizer()->exchange().adopt(std::move(link)); }});
  Reducer* reducer = preparation_.reducer();
  if (reducer == nullptr) return;
  reducer->connect();
  for (const auto& link : reducer->links()) {
    PullLink* to = link.get();
    calls_.push_back({link->name(), setup_.view.own[static_cast<size_t>(link->rank())], Attach::Purpose::kReduce,
                      [to](std::shared_ptr<Link> made) { to->adopt(std::move(made)); }});
  }
}

std::vector<Session::Linked> SenderSession::linked() const {
  std::vector<Linked> peers;
  const auto ready = [](const auto& links, Rank rank) {
    const auto it = links.find(rank);
    return it != links.end() && it->second->ready();
  };
  for (Rank rank = 0; rank < static_cast<Rank>(setup_.view.peer.size()); ++rank)
    if (setup_.routes.connects(rank, rank))
      peers.push_back({rank_name(setup_.view.peer_job, rank), ready(receivers_, rank)});
  for (Rank rank = 0; rank < static_cast<Rank>(setup_.view.own.size()); ++rank)
    if (rank != identity().rank && !setup_.routes.reduced_by[static_cast<size_t>(rank)].empty())
      peers.push_back({rank_name(identity().job, rank), ready(owners_, rank)});
  if (const Reducer* reducer = preparation_.reducer())
    for (const auto& link : reducer->links()) peers.push_back({link->name(), link->ready()});
  if (const Quantizer* quantizer = preparation_.quantizer())
    for (const Rank rank : quantizer->exchange().peers())
      peers.push_back({rank_name(identity().job, rank), quantizer->exchange().ready(rank)});
  return peers;
}

void SenderSession::accept(Caller caller) {
  const bool reduces = caller.attach.purpose == Attach::Purpose::kReduce;
  if (caller.attach.purpose == Attach::Purpose::kControl)
    fail(ErrorCode::kMismatch, "{}: {} offers it and chooses no version"_message, describe(), identity().name());
  if (caller.attach.purpose == Attach::Purpose::kAgree) {
    Quantizer* quantizer = preparation_.quantizer();
    if (quantizer == nullptr)
      fail(ErrorCode::kMismatch, "{}: {} quantises nothing of it"_message, describe(), identity().name());
    check_caller(caller, identity().job, setup_.view.own);
    return quantizer->exchange().accept(std::move(caller));
  }
  const std::vector<RankRecord>& ranks = reduces ? setup_.view.own : setup_.view.peer;
  check_caller(caller, reduces ? identity().job : setup_.view.peer_job, ranks);
  auto& links = reduces ? owners_ : receivers_;
  const Rank rank = caller.hello.rank;
  if (links.contains(rank))
    fail(ErrorCode::kAlreadyExists, "{}: {} is attached already"_message, describe(), caller.link->name());
  if (!reduces && !setup_.routes.connects(rank, rank))
    fail(ErrorCode::kMismatch, "{}: {} reads nothing of {}"_message, describe(), caller.link->name(),
         identity().name());
  caller.link->watch_worker(ranks[static_cast<size_t>(rank)].worker);
  std::vector<ServedRoute> served = served_to(setup_, preparation_, caller);
  if (!reduces) owner_.on_receiver(caller.hello.incarnation);
  links.emplace(
      rank, std::make_unique<SourceLink>(
                *setup_.agent, *setup_.runs, *this, std::move(caller), std::move(served), reduces ? 1 : setup_.slots,
                SourceLinkDigest{.on = setup_.agreement.digest && !reduces, .sample = setup_.agreement.sample}));
}

bool SenderSession::is_receiver(const SourceLink& link) const {
  const auto it = receivers_.find(link.rank());
  return it != receivers_.end() && it->second.get() == &link;
}

RankShare SenderSession::share() const {
  RankShare share = preparation_.quantizer() ? preparation_.quantizer()->share() : RankShare{};
  share.bytes = rank_bytes_;
  return share;
}

void SenderSession::on_source_ready(SourceLink& link) {
  if (link.streams()) setup_.on_allocation();
  if (is_receiver(link)) rank_bytes_ += link.bytes();
  attached_one();
}

void SenderSession::attached_one() {
  if (unready().empty())
    digests_.build(receivers_,
                   [this](uint32_t sent, uint32_t slot) { return sent_route(setup_, preparation_, sent, slot).route; });
  readiness_changed();
}

// --- offering ------------------------------------------------------------------------------------

std::optional<uint32_t> SenderSession::slot_of(int64_t version) const {
  const auto it = std::ranges::find(on_offer_, version);
  if (it == on_offer_.end() || version == 0) return std::nullopt;
  return static_cast<uint32_t>(it - on_offer_.begin());
}

void SenderSession::prepare_offer(int64_t version, uint32_t slot) {
  offering_ = version;
  failure_ = {};
  failure_cause_ = {};
  last_activity_ = Clock::steady().now();
  for (const auto& [rank, link] : owners_) link->offer(version, 0);
  phase_ = Phase::kPreparing;
  preparation_.start(version, slot, !staged());
}

void SenderSession::copied(const Status& status) {
  if (phase_ != Phase::kPreparing) return;
  if (!status.ok()) return fail_offer(status);
  preparation_.copied();
}

void SenderSession::on_prepared() {
  if (staged()) return check_ended();
  phase_ = Phase::kOffered;
  show(offering_, 0);
  owner_.on_unpinned(*this);
}

void SenderSession::offer_slot(int64_t version, uint32_t slot) {
  show(version, slot);
}

void SenderSession::show(int64_t version, uint32_t slot) {
  on_offer_[slot] = version;
  for (const auto& [rank, link] : receivers_)
    if (link->open()) link->offer(version, slot);
  const bool ready = digests_.begin(slot, version, preparation_.compared(version, slot));
  if (ready && staged() && (preparation_.quantizer() || preparation_.deltas())) owner_.on_digested(*this, version);
}

bool SenderSession::pinned(uint32_t slot) const {
  const int64_t version = on_offer_[slot];
  if (digests_.running(slot) || (version != 0 && version == held_)) return true;
  return std::ranges::any_of(receivers_, [&](const auto& entry) {
    return entry.second->open() && version != 0 && entry.second->taking() == version;
  });
}

void SenderSession::clear(uint32_t slot) {
  const int64_t version = std::exchange(on_offer_[slot], 0);
  if (version == 0) return;
  for (const auto& [rank, link] : receivers_)
    if (link->open()) link->withdraw(version);
}

// --- being read ----------------------------------------------------------------------------------

Status SenderSession::why_withdrawn() const {
  return leaving_.ok() ? failed(ErrorCode::kCancelled, "it was withdrawn"_message) : leaving_;
}

void SenderSession::on_hold(SourceLink& link, int64_t version, uint32_t epoch) {
  if (link.rank() != 0 || !is_receiver(link))
    fail(ErrorCode::kMismatch, "Hold of version {}: rank 0 of the receivers chooses"_message, version);
  const bool gone = !slot_of(version) || phase_ == Phase::kFailing || broken();
  if (gone) return link.refuse(version, epoch, why_withdrawn());
  held_ = version;
  link.keep(version, epoch);
}

void SenderSession::on_released(SourceLink& link) {
  if (!is_receiver(link) || begun(held_)) return;
  held_ = 0;
  owner_.on_unpinned(*this);
}

void SenderSession::on_take(SourceLink& link, const Take& take) {
  const int64_t version = take.version;
  const uint32_t epoch = take.epoch;
  const bool reduces = !is_receiver(link);
  const std::optional<uint32_t> slot = slot_of(version);
  const bool on_offer = reduces ? version == offering_ && (phase_ == Phase::kPreparing || phase_ == Phase::kOffered)
                                : slot && (staged() ? !broken() || version == held_ : phase_ == Phase::kOffered);
  if (!on_offer) {
    const bool given_up = version == offering_ && !failure_cause_.ok();
    return link.refuse(version, epoch, given_up ? failure_cause_ : why_withdrawn());
  }
  last_activity_ = Clock::steady().now();
  if (!reduces) held_ = version;
  if (reduces)
    link.grant(version, epoch, 0, {});
  else
    grant(link, take, *slot);
  if (!reduces) owner_.on_begun(version);
  owner_.on_taking(*this);
  if (!reduces && digests_.ready(*slot)) digests_.send(link, *slot, version);
}

// Deltas are of use only on top of what they were made from.
void SenderSession::grant(SourceLink& link, const Take& take, uint32_t slot) {
  deltas_.clear();
  if (!digests_.compared(slot)) return link.grant(take.version, take.epoch, 0, deltas_);
  const DeltaEncoder& encoder = *preparation_.deltas();
  const Stamp base = encoder.base(slot);
  if (base != 0 && take.held != 0 && (take.held == base || mutated(Mutation::kStaleBase)))
    for (const LinkRoute& route : setup_.routes.by_peer[static_cast<size_t>(link.rank())])
      deltas_.push_back(encoder.delta_bytes(route.route, slot));
  link.grant(take.version, take.epoch, encoder.stamp(slot), deltas_);
}

void SenderSession::on_digests(uint32_t slot) {
  const int64_t version = on_offer_[slot];
  const bool ready = digests_.ready(slot);
  for (const auto& [rank, link] : receivers_)
    if (ready && version != 0 && link->taking() == version) digests_.send(*link, slot, version);
  if (ready && staged()) owner_.on_digested(*this, version);
  check_ended();
  if (staged()) owner_.on_unpinned(*this);
}

void SenderSession::on_source_run_done(SourceLink& link) {
  const Status status = link.run()->status();
  if (!status.ok() && phase_ == Phase::kOffered && link.open()) {
    fail_offer(status);
  } else if (status.ok() && link.taking() != 0) {
    const std::optional<uint32_t> slot = slot_of(link.taking());
    digests_.send_streamed(link, slot && is_receiver(link) ? &*slot : nullptr, link.taking());
  }
  check_ended();
}

void SenderSession::on_progress(SourceLink&) {
  last_activity_ = Clock::steady().now();
}

// Staged, receivers take what there is; only where this rank's terms are wanted does another one wait for it.
void SenderSession::on_ahead(SourceLink& link, int64_t version) {
  if (is_receiver(link) && link.rank() != 0)
    fail(ErrorCode::kMismatch, "Ahead of version {}: rank 0 of the receivers chooses"_message, version);
  owner_.on_ahead(version, !staged() || !is_receiver(link));
}

void SenderSession::on_done(SourceLink& link, const Done& done) {
  last_activity_ = Clock::steady().now();
  if (done.status.ok()) {
    if (is_receiver(link)) {
      setup_.on_moved(link.granted_bytes(), link.deltas());
      const auto has = [&](const auto& entry) { return entry.second->done_version() == done.version; };
      if (std::ranges::all_of(receivers_, has)) owner_.on_taken(*this, done.version);
    }
  } else {
    link.abort_run(done.status);
    if (staged() && is_receiver(link))
      log().info("{}: {} does not take version {}: {}", describe(), link.name(), done.version, done.status.message());
    else if (done.version == offering_ && is_receiver(link) &&
             (phase_ == Phase::kOffered || phase_ == Phase::kPreparing))
      fail_offer(Status(done.status.code(), fmt::format("{}: {}", link.name(), done.status.message())));
  }
  check_taken();
  check_ended();
  if (!is_receiver(link)) owner_.on_unpinned(*this);
}

void SenderSession::check_taken() {
  const auto over = [&](const auto& entry) { return entry.second->ended_version() == held_ || !entry.second->open(); };
  if (held_ == 0 || !std::ranges::all_of(receivers_, over)) return;
  held_ = 0;
  owner_.on_unpinned(*this);
}

// Staged, a receiver is waited for only where its slot is needed: see SenderBatch::check_peers().
std::vector<Link*> SenderSession::links() const {
  std::vector<Link*> links;
  for (const ReceiverLinks* callers : {&receivers_, &owners_})
    for (const auto& [rank, link] : *callers) links.push_back(link->connection());
  for (Link* link : preparation_.links()) links.push_back(link);
  return links;
}

std::vector<Link*> SenderSession::awaited_links() const {
  std::vector<Link*> links;
  const auto at_it = [&](const SourceLink& link) { return link.taking() != 0; };
  for (const auto& [rank, link] : receivers_) {
    const bool pins = held_ != 0 && link->ended_version() != held_;
    const bool needed = phase_ == Phase::kOffered && link->done_version() != offering_;
    if (at_it(*link) || (staged() ? pins : needed)) links.push_back(link->connection());
  }
  for (const auto& [rank, link] : owners_)
    if (at_it(*link) || (phase_ != Phase::kIdle && link->ended_version() != offering_))
      links.push_back(link->connection());
  if (const Reducer* reducer = preparation_.reducer(); reducer != nullptr && reducer->busy())
    for (const auto& link : reducer->links()) links.push_back(link->connection());
  if (const Quantizer* quantizer = preparation_.quantizer())
    for (Link* link : quantizer->exchange().awaited_links()) links.push_back(link);
  return links;
}

// --- ending --------------------------------------------------------------------------------------

bool SenderSession::idle() const {
  if (phase_ != Phase::kIdle) return false;
  return !digests_.any_running() && !(staged() && (reading() || held_ != 0));
}

void SenderSession::check_ended() {
  if (staged()) {
    // A thread that fills a stream may still have to say so when the peer has drained it.
    const auto ended = [&](const auto& entry) { return entry.second->ended_version() == offering_; };
    const bool read = bus::reading(owners_) || (phase_ != Phase::kFailing && !std::ranges::all_of(owners_, ended));
    const bool prepared = phase_ != Phase::kPreparing || preparation_.complete();
    if (phase_ != Phase::kIdle && !read && prepared && !preparation_.busy())
      end(phase_ == Phase::kFailing ? failure_ : Status());
    else if (retires())
      owner_.on_sender_retired(*this);
    if (!leaving_.ok() && idle()) owner_.on_unpinned(*this);
    return;
  }
  if (phase_ == Phase::kIdle || phase_ == Phase::kPreparing) return;
  if (digests_.running(0) || preparation_.busy() || reading()) return;
  if (phase_ == Phase::kOffered)
    for (const auto& [rank, link] : receivers_)
      if (link->done_version() != offering_) return;
  on_offer_.front() = 0;
  end(phase_ == Phase::kOffered ? Status() : failure_);
}

void SenderSession::end(const Status& status) {
  phase_ = Phase::kIdle;
  if (!staged()) {
    held_ = 0;
    loop().cancel_timer(std::exchange(revoke_timer_, 0));
    owner_.on_offer_over(*this, status);
  } else {
    owner_.on_prepared(*this, status);
  }
  if (retires()) owner_.on_sender_retired(*this);
}

// --- failing -------------------------------------------------------------------------------------

// Staged: what is on offer already stays.
void SenderSession::fail_offer(const Status& status) {
  if (phase_ == Phase::kIdle) return;
  if (phase_ == Phase::kFailing) return check_ended();  // whoever it waited for to stop reading may be lost
  phase_ = Phase::kFailing;
  failure_cause_ = status;
  failure_ = Status(status.code(), fmt::format("{}: {} while {} sent version {}"_message, describe(), status.message(),
                                               identity().name(), offering_));
  preparation_.abort(status);
  const auto take_back = [&](const auto& links) {
    for (const auto& [rank, link] : links) {
      if (link->open()) link->withdraw(offering_);
      if (link->open() && link->taking() != 0) link->revoke(status);
      link->abort_run(status);
    }
  };
  take_back(owners_);
  if (!staged()) {
    digests_.abort(0, status);
    take_back(receivers_);
  }
  if (revoke_timer_ == 0) revoke_timer_ = loop().add_timer_after(kRevokeGrace, [this] { stop_waiting_for_readers(); });
  check_ended();
}

void SenderSession::leave(const Status& why) {
  leaving_ = why;
  for (uint32_t slot = 0; slot < on_offer_.size(); ++slot) {
    clear(slot);
    digests_.abort(slot, why);
  }
  held_ = 0;
  for (const auto& [rank, link] : receivers_) {
    if (link->open() && link->taking() != 0) link->revoke(why);
    link->abort_run(why);
  }
  if (revoke_timer_ == 0) revoke_timer_ = loop().add_timer_after(kRevokeGrace, [this] { stop_waiting_for_readers(); });
}

// A receiver that was asked to stop reading does not answer: cut it off, which it sees as the end of this session.
void SenderSession::stop_waiting_for_readers() {
  revoke_timer_ = 0;
  for (const auto* links : {&receivers_, &owners_}) {
    for (const auto& [rank, link] : *links) {
      if (link->taking() == 0 || !link->open()) continue;
      if (staged() && !broken() && leaving_.ok() && is_receiver(*link)) continue;  // it was not asked
      log_event(LogLevel::warn, "connection.closed", {{"peer", link->name()}},
                "{}: {} does not stop reading; its connection is closed"_message, describe(), link->name());
      const Status reason = failed(ErrorCode::kPeerLost, "{} did not answer"_message, link->name());
      cut(*link);
      link->detach(reason);
      break_session(reason);
    }
  }
  if (broken()) held_ = 0;
  check_ended();
}

bool SenderSession::flows_since(TimePoint then) const {
  const auto taking = [&](const auto& entry) {
    return entry.second->taking() == offering_ || entry.second->done_version() == offering_;
  };
  return phase_ == Phase::kOffered && std::ranges::all_of(receivers_, taking) && last_activity_ > then;
}

std::string SenderSession::who_has_not_taken() const {
  if (phase_ == Phase::kPreparing) return preparation_.missing();
  return bus::who_has_not_taken(receivers_, offering_);
}

std::string SenderSession::awaited() const {
  if (phase_ == Phase::kPreparing) return preparation_.awaited();
  return bus::awaited(receivers_, offering_);
}

bool SenderSession::begun(int64_t version) const {
  return version != 0 && bus::begun(receivers_, version);
}

bool SenderSession::undecided(int64_t version) const {
  if (version == 0 || broken() || begun(version)) return false;
  const auto reads_terms = [&](const auto& entry) { return entry.second->ended_version() != version; };
  const bool reduces = phase_ == Phase::kPreparing || std::ranges::any_of(owners_, reads_terms);
  return held_ == version || (!staged() && version == offering_ && phase_ != Phase::kFailing && reduces);
}

void SenderSession::on_source_detached(SourceLink& link, const Status& reason) {
  if (!broken()) left_ = link.left();
  link.abort_run(reason);
  break_session(reason);
}

void SenderSession::on_source_lost(SourceLink& link, const Status& status) {
  cut(link);
  link.abort_run(status);
  break_session(status);
}

void SenderSession::on_source_broken(SourceLink& link, const Status& status) {
  break_session(status);
  if (link.done_version() != offering_) fail_offer(status);  // it will not take this version any more
}

void SenderSession::on_broken(const Status& latest) {
  if (held_ != 0 && !begun(held_)) owner_.on_begun(held_);
  // Nobody has to be told: rank 0 of the receivers is connected with all, and sees it.
  // A receiver that has all it wanted may go while others are still at it.
  const auto gone = [&](const auto& entry) {
    return !entry.second->open() && entry.second->done_version() != offering_;
  };
  if (!staged() && phase_ == Phase::kOffered && std::ranges::none_of(receivers_, gone)) return check_ended();
  fail_offer(latest);
  if (staged()) {
    // Others may go on with what they have chosen; they choose nothing any more.
    check_taken();
    for (const auto& [rank, link] : receivers_)
      for (const int64_t version : on_offer_)
        if (link->open() && version != 0 && version != held_) link->withdraw(version);
    if (!idle() && revoke_timer_ == 0)
      revoke_timer_ = loop().add_timer_after(setup_.stall, [this] { stop_waiting_for_readers(); });
    owner_.on_unpinned(*this);
  }
  if (retires()) owner_.on_sender_retired(*this);
}

void SenderSession::detach_all(const Status& why) {
  loop().cancel_timer(std::exchange(revoke_timer_, 0));
  for (const auto& [rank, link] : receivers_)
    if (link->open()) link->detach(why);
  for (const auto& [rank, link] : owners_)
    if (link->open()) link->detach(why);
  preparation_.detach(why);
}

}  // namespace tessera::bus
