#include "bus/sender/sender_session.h"

#include <algorithm>

#include "base/fail.h"
#include "base/log.h"
#include "base/mutation.h"
#include "bus/sender/sender_batch.h"
#include "bus/sender/served_routes.h"

namespace tessera::bus {

SenderSession::SenderSession(SessionSetup setup, SenderBatch& batch)
    : Session(std::move(setup)),
      batch_(batch),
      terms_(*this),
      preparation_(setup_,
                   [this](const SentRoute& route, uint32_t slot) {
                     return sent_elements(setup_, preparation_.reducer(), route, slot).route;
                   },
                   {.ready_changed = [this] { attached_one(); },
                    .lost = [this](const Status& status) { break_session(status); },
                    .prepared = [this] { latest_->on_prepared(); },
                    .failed = [this](const Status& status) { fail_offer(status); },
                    .stopped = [this] { check_ended(); },
                    .ahead = [this](int64_t version) { note_own_ahead(version); }}),
      digests_(setup_, preparation_, [this](uint32_t slot) { on_digests(slot); }) {
  for (uint32_t slot = 0; slot < setup_.slots; ++slot) versions_.push_back(batch_.make_offered(*this, slot));
  latest_ = versions_.front().get();
}

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
  for (Rank rank = 0; rank < static_cast<Rank>(setup_.view.peer.size()); ++rank) {
    if (!setup_.routes.connects(rank, rank)) continue;
    const auto it = receivers_.find(rank);
    peers.push_back({rank_name(setup_.view.peer_job, rank), it != receivers_.end() && it->second->ready()});
  }
  for (Rank rank = 0; rank < static_cast<Rank>(setup_.view.own.size()); ++rank)
    if (rank != identity().rank && !setup_.routes.reduced_by[static_cast<size_t>(rank)].empty())
      peers.push_back({rank_name(identity().job, rank), terms_.ready(rank)});
  if (const Reducer* reducer = preparation_.reducer())
    for (const auto& link : reducer->links()) peers.push_back({link->name(), link->ready()});
  if (const Quantizer* quantizer = preparation_.quantizer())
    for (const Rank rank : quantizer->exchange().peers())
      peers.push_back({rank_name(identity().job, rank), quantizer->exchange().ready(rank)});
  return peers;
}

void SenderSession::accept(Caller caller) {
  switch (caller.attach.purpose) {
    case Attach::Purpose::kControl:
      fail(ErrorCode::kMismatch, "{}: {} offers it and chooses no version"_message, describe(), identity().name());
    case Attach::Purpose::kAgree:
      return accept_amaxes(std::move(caller));
    case Attach::Purpose::kReduce: {
      check_caller(caller, identity().job, setup_.view.own);
      caller.link->watch_worker(setup_.view.own[static_cast<size_t>(caller.hello.rank)].worker);
      std::vector<ServedRoute> served = served_to(setup_, preparation_, caller);
      return terms_.accept(std::move(caller), std::move(served));
    }
    case Attach::Purpose::kPull:
      return accept_receiver(std::move(caller));
  }
}

void SenderSession::accept_amaxes(Caller caller) {
  Quantizer* quantizer = preparation_.quantizer();
  if (quantizer == nullptr)
    fail(ErrorCode::kMismatch, "{}: {} quantises nothing of it"_message, describe(), identity().name());
  check_caller(caller, identity().job, setup_.view.own);
  quantizer->exchange().accept(std::move(caller));
}

void SenderSession::accept_receiver(Caller caller) {
  check_caller(caller, setup_.view.peer_job, setup_.view.peer);
  const Rank rank = caller.hello.rank;
  if (receivers_.contains(rank))
    fail(ErrorCode::kAlreadyExists, "{}: {} is attached already"_message, describe(), caller.link->name());
  if (!setup_.routes.connects(rank, rank))
    fail(ErrorCode::kMismatch, "{}: {} reads nothing of {}"_message, describe(), caller.link->name(),
         identity().name());
  caller.link->watch_worker(setup_.view.peer[static_cast<size_t>(rank)].worker);
  std::vector<ServedRoute> served = served_to(setup_, preparation_, caller);
  batch_.on_receiver(caller.hello.incarnation);
  receivers_.emplace(rank, std::make_unique<SourceLink>(
                               *setup_.agent, *setup_.runs, *this, std::move(caller), std::move(served), setup_.slots,
                               SourceLinkDigest{.on = setup_.agreement.digest, .sample = setup_.agreement.sample}));
}

RankShare SenderSession::share() const {
  RankShare share = preparation_.quantizer() ? preparation_.quantizer()->share() : RankShare{};
  share.bytes = rank_bytes_;
  return share;
}

bool SenderSession::must_prepare() const {
  return preparation_.reducer() || !terms_.owners().empty() || preparation_.quantizer();
}

void SenderSession::on_source_ready(SourceLink& link) {
  if (link.streams()) setup_.on_allocation();
  rank_bytes_ += link.bytes();
  attached_one();
}

void SenderSession::attached_one() {
  if (unready().empty())
    digests_.build(receivers_,
                   [this](uint32_t sent, uint32_t slot) { return sent_route(setup_, preparation_, sent, slot).route; });
  readiness_changed();
}

// --- offering ------------------------------------------------------------------------------------

void SenderSession::begin_offer(OfferedVersion& version) {
  latest_ = &version;
  note_activity();
}

Status SenderSession::not_sent(int64_t version, const Status& why) const {
  return Status(why.code(), fmt::format("{}: {} while {} sent version {}"_message, describe(), why.message(),
                                        identity().name(), version));
}

OfferedVersion* SenderSession::with(int64_t version) {
  const auto it = std::ranges::find(versions_, version, [](const auto& slot) { return slot->version(); });
  return it == versions_.end() || version == 0 ? nullptr : it->get();
}

// --- being read ----------------------------------------------------------------------------------

Status SenderSession::why_gone(int64_t version) const {
  Status why = latest_->why_given_up(version);
  if (!why.ok()) return why;
  return leaving_.ok() ? failed(ErrorCode::kCancelled, "it was withdrawn"_message) : leaving_;
}

void SenderSession::on_hold(SourceLink& link, int64_t version, uint32_t epoch) {
  if (link.rank() != 0)
    fail(ErrorCode::kMismatch, "Hold of version {}: rank 0 of the receivers chooses"_message, version);
  const OfferedVersion* offered = with(version);
  if (offered == nullptr || !offered->on_offer() || broken()) return link.refuse(version, epoch, why_gone(version));
  held_ = version;
  link.keep(version, epoch);
}

void SenderSession::on_released(SourceLink&) {
  if (begun(held_)) return;
  held_ = 0;
  note_unpinned();
}

void SenderSession::on_take(SourceLink& link, const Take& take) {
  OfferedVersion* offered = with(take.version);
  if (offered == nullptr || !offered->may_be_taken())
    return link.refuse(take.version, take.epoch, why_gone(take.version));
  note_activity();
  held_ = take.version;
  grant(link, take, offered->slot());
  batch_.on_begun(take.version);
  offered->on_reading();
  if (digests_.ready(offered->slot())) digests_.send(link, offered->slot(), take.version);
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

void SenderSession::note_reading() {
  note_activity();
  latest_->on_reading();
}

void SenderSession::on_digests(uint32_t slot) {
  const int64_t version = offered(slot).version();
  const bool ready = digests_.ready(slot);
  for (const auto& [rank, link] : receivers_)
    if (ready && version != 0 && link->taking() == version) digests_.send(*link, slot, version);
  offered(slot).on_digests();
  check_ended();
}

void SenderSession::check_stream(const SourceLink& link) {
  const Status status = link.run()->status();
  if (!status.ok() && link.open()) latest_->on_stream_failed(status);
}

void SenderSession::on_source_run_done(SourceLink& link) {
  check_stream(link);
  if (link.run()->status().ok() && link.taking() != 0) {
    const OfferedVersion* offered = with(link.taking());
    const uint32_t slot = offered == nullptr ? 0 : offered->slot();
    digests_.send_streamed(link, offered == nullptr ? nullptr : &slot, link.taking());
  }
  check_ended();
}

void SenderSession::on_ahead(SourceLink& link, int64_t version) {
  if (link.rank() != 0)
    fail(ErrorCode::kMismatch, "Ahead of version {}: rank 0 of the receivers chooses"_message, version);
  batch_.on_others_ahead(version);
}

void SenderSession::note_own_ahead(int64_t version) {
  batch_.on_terms_ahead(version);
}

void SenderSession::on_done(SourceLink& link, const Done& done) {
  note_activity();
  if (done.status.ok()) {
    setup_.on_moved(link.granted_bytes(), link.deltas());
    const auto has = [&](const auto& entry) { return entry.second->done_version() == done.version; };
    if (std::ranges::all_of(receivers_, has)) batch_.on_taken(*this, done.version);
  } else {
    link.abort_run(done.status);
    if (OfferedVersion* offered = with(done.version)) offered->on_not_taken(link, done.status);
  }
  check_taken();
  check_ended();
}

void SenderSession::check_taken() {
  const auto over = [&](const auto& entry) { return entry.second->ended_version() == held_ || !entry.second->open(); };
  if (held_ == 0 || !std::ranges::all_of(receivers_, over)) return;
  held_ = 0;
  note_unpinned();
}

void SenderSession::let_go(int64_t version) {
  if (held_ == version) held_ = 0;
}

void SenderSession::note_unpinned() {
  batch_.on_unpinned();
}

bool SenderSession::begun(int64_t version) const {
  return version != 0 && bus::begun(receivers_, version);
}

bool SenderSession::undecided(int64_t version) const {
  if (version == 0 || broken() || begun(version)) return false;
  return held_ == version || (version == latest_->version() && latest_->undecided());
}

std::vector<Link*> SenderSession::links() const {
  std::vector<Link*> links;
  for (const ReceiverLinks* callers : {&receivers_, &terms_.owners()})
    for (const auto& [rank, link] : *callers) links.push_back(link->connection());
  for (Link* link : preparation_.links()) links.push_back(link);
  return links;
}

// A receiver of a snapshot is waited for only where its slot is needed: see StagedSender::check_peers().
std::vector<Link*> SenderSession::awaited_links() const {
  std::vector<Link*> links;
  for (const auto& [rank, link] : receivers_) {
    const auto awaits = [&](const auto& offered) { return offered->awaits(*link); };
    if (link->taking() != 0 || std::ranges::any_of(versions_, awaits)) links.push_back(link->connection());
  }
  for (const auto& [rank, link] : terms_.owners())
    if (link->taking() != 0 || (offering() && terms_.awaits(*link))) links.push_back(link->connection());
  if (const Reducer* reducer = preparation_.reducer(); reducer != nullptr && reducer->busy())
    for (const auto& link : reducer->links()) links.push_back(link->connection());
  if (const Quantizer* quantizer = preparation_.quantizer())
    for (Link* link : quantizer->exchange().awaited_links()) links.push_back(link);
  return links;
}

void SenderSession::check_receivers() {
  for (const auto& [rank, link] : receivers_) link->connection()->end_if_stopped();
}

// --- ending --------------------------------------------------------------------------------------

bool SenderSession::idle() const {
  return !offering() && !digests_.any_running() && !reading() && held_ == 0;
}

void SenderSession::check_ended() {
  latest_->check_ended();
  if (retires()) batch_.on_sender_retired(*this);
  if (!leaving_.ok() && idle()) note_unpinned();
}

void SenderSession::leave(const Status& why) {
  leaving_ = why;
  for (const auto& version : versions_) version->on_leaving(why);
  held_ = 0;
  for (const auto& [rank, link] : receivers_) {
    if (link->open() && link->taking() != 0) link->revoke(why);
    link->abort_run(why);
  }
  bound_reading(kReadGrace);
}

void SenderSession::bound_reading(Duration grace) {
  if (cut_timer_ == 0) cut_timer_ = loop().add_timer_after(grace, [this] { cut_off_readers(); });
}

void SenderSession::end_reading() {
  if (reading() && (broken() || !leaving_.ok())) return;
  loop().cancel_timer(std::exchange(cut_timer_, 0));
}

bool SenderSession::was_asked_to_stop(const SourceLink& receiver) {
  const OfferedVersion* offered = with(receiver.taking());
  return broken() || !leaving_.ok() || offered == nullptr || offered->failing();
}

// A reader that was asked to stop does not answer: cut it off, which it sees as the end of this session.
void SenderSession::cut_off_readers() {
  cut_timer_ = 0;
  for (const auto& [rank, link] : receivers_)
    if (was_asked_to_stop(*link)) cut_off(*link);
  for (const auto& [rank, link] : terms_.owners()) cut_off(*link);
  if (broken()) held_ = 0;
  check_ended();
}

void SenderSession::cut_off(SourceLink& link) {
  if (link.taking() == 0 || !link.open()) return;
  const LogScope scope = log_scope();
  log_event(LogLevel::warn, "connection.closed", {{"peer", link.name()}},
            "{}: {} does not stop reading; its connection is closed"_message, describe(), link.name());
  const Status reason = failed(ErrorCode::kPeerLost, "{} did not answer"_message, link.name());
  cut_lease(link);
  link.detach(reason);
  break_session(reason);
}

// Its process may still read what it has the lease of.
void SenderSession::cut_lease(const SourceLink& link) {
  if (link.leased()) offered(link.slot()).on_lease_cut(link.process());
}

// --- losing peers --------------------------------------------------------------------------------

void SenderSession::on_source_lost(SourceLink& link, const Status& status) {
  cut_lease(link);
  end_link(link, status, false);
}

void SenderSession::end_link(SourceLink& link, const Status& why, bool left) {
  if (!broken()) left_ = left;
  link.abort_run(why);
  break_session(why);
}

void SenderSession::hear_broken(const SourceLink& link, const Status& status) {
  break_session(status);
  if (link.done_version() != latest_->version()) fail_offer(status);  // it will not take this version any more
}

// Nobody has to be told: rank 0 of the receivers is connected with all, and sees it.
void SenderSession::on_broken(const Status& latest) {
  if (held_ != 0 && !begun(held_)) batch_.on_begun(held_);
  latest_->on_broken(latest);
  for (const auto& version : versions_)
    if (version.get() != latest_) version->on_broken(latest);
  note_unpinned();
  if (retires()) batch_.on_sender_retired(*this);
}

void SenderSession::detach_all(const Status& why) {
  loop().cancel_timer(std::exchange(cut_timer_, 0));
  for (const auto& [rank, link] : receivers_)
    if (link->open()) link->detach(why);
  terms_.detach(why);
  preparation_.detach(why);
}

}  // namespace tessera::bus
