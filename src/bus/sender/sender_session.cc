#include "bus/sender/sender_session.h"

#include <algorithm>

#include "base/fail.h"
#include "base/log.h"
#include "base/mutation.h"

namespace tessera::bus {

SenderSession::SenderSession(SessionSetup setup, SenderSessionOwner& owner)
    : Session(std::move(setup)), owner_(owner), slots_(setup_.slots) {
  // Scratch comes before anyone can attach: its place is told with the rest.
  if (!setup_.routes.reductions.empty()) {
    reducer_ =
        std::make_unique<Reducer>(*setup_.agent, setup_,
                                  Reducer::Events{.ready_changed = [this] { attached_one(); },
                                                  .lost = [this](const Status& status) { break_session(status); },
                                                  .reduced = [this](const Status& status) { on_reduced(status); }});
    setup_.on_allocation();
  }
  if (setup_.agreement.delta) {
    delta_ = std::make_unique<DeltaEncoder>(
        *setup_.agent, setup_,
        [this](const SentRoute& route, uint32_t slot) { return sent_elements(route, slot).route; },
        [this](const Status& status) { on_compared(status); });
    setup_.on_allocation();
  }
  if (!Quantizer::wanted(setup_.agreement.match)) return;
  quantizer_ = std::make_unique<Quantizer>(
      *setup_.agent, setup_, [this](const SentRoute& route, uint32_t slot) { return sent_elements(route, slot).route; },
      Quantizer::Events{.ready_changed = [this] { attached_one(); },
                        .lost = [this](const Status& status) { break_session(status); },
                        .quantized = [this](const Status& status) { on_quantized(status); }});
  setup_.on_allocation();
}

// --- attaching -----------------------------------------------------------------------------------

void SenderSession::connect() {
  if (quantizer_ && identity().rank != 0)
    calls_.push_back({rank_name(identity().job, 0), setup_.view.own[0], Attach::Purpose::kAgree,
                      [this](std::shared_ptr<Link> link) { quantizer_->exchange().adopt(std::move(link)); }});
  if (!reducer_) return;
  reducer_->connect();
  for (const auto& link : reducer_->links()) {
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
    peers.push_back({rank_name(setup_.view.peer_job, rank), ready(receivers_, rank)});
  for (Rank rank = 0; rank < static_cast<Rank>(setup_.view.own.size()); ++rank)
    if (rank != identity().rank && !setup_.routes.reduced_by[static_cast<size_t>(rank)].empty())
      peers.push_back({rank_name(identity().job, rank), ready(owners_, rank)});
  if (reducer_)
    for (const auto& link : reducer_->links()) peers.push_back({link->name(), link->ready()});
  if (quantizer_)
    for (const Rank rank : quantizer_->exchange().peers())
      peers.push_back({rank_name(identity().job, rank), quantizer_->exchange().ready(rank)});
  return peers;
}

SourceRoute SenderSession::source_route(const LinkRoute& route, const LocalTensor& local) const {
  const Match::Tensor& matched = setup_.agreement.match.tensors[route.tensor];
  return {.what = {.tensor = route.tensor, .shape = matched.shape, .dtype = matched.src_dtype, .region = route.region},
          .src = local.array,
          .data = local.data};
}

ServedRoute SenderSession::sent_route(uint32_t sent, uint32_t slot) const {
  return quantises(sent) ? quantizer_->piece(sent, slot) : sent_elements(setup_.routes.sent[sent], slot);
}

ServedRoute SenderSession::served_route(uint32_t sent) const {
  ServedRoute served = sent_route(sent, 0);
  if (delta_ && delta_->covers(sent)) delta_->place(sent, served);
  return served;
}

ServedRoute SenderSession::sent_elements(const SentRoute& route, uint32_t slot) const {
  ServedRoute served;
  served.route = source_route({.tensor = route.tensor, .route = 0, .region = route.region, .src_owned = {}},
                              setup_.tensors[route.tensor]);
  served.slot_bytes = setup_.slot_bytes;
  if (route.reduction != SentRoute::kNone) {
    SourceRoute& source = served.route;
    source.src = {.owned = route.region, .strides = byte_strides(source.what.dtype, route.region.extents())};
    source.data = reducer_->result(route.reduction);
    served.slot_bytes = staged() ? reducer_->slot_bytes() : 0;
    served.per_route = true;
  }
  served.route.data += slot * served.slot_bytes;
  return served;
}

std::vector<ServedRoute> SenderSession::served_to(const Caller& caller) const {
  std::vector<ServedRoute> served;
  const auto rank = static_cast<size_t>(caller.hello.rank);
  if (caller.attach.purpose == Attach::Purpose::kReduce) {
    for (const LinkRoute& route : setup_.routes.reduced_by[rank])
      served.push_back({.route = source_route(route, setup_.terms[route.tensor])});
  } else {
    for (const LinkRoute& route : setup_.routes.by_peer[rank]) served.push_back(served_route(route.route));
  }
  return served;
}

void SenderSession::accept(Caller caller) {
  const bool reduces = caller.attach.purpose == Attach::Purpose::kReduce;
  if (caller.attach.purpose == Attach::Purpose::kControl)
    fail(ErrorCode::kMismatch, "{}: {} offers it and chooses no version", describe(), identity().name());
  if (caller.attach.purpose == Attach::Purpose::kAgree) {
    if (!quantizer_) fail(ErrorCode::kMismatch, "{}: {} quantises nothing of it", describe(), identity().name());
    check_caller(caller, identity().job, setup_.view.own);
    return quantizer_->exchange().accept(std::move(caller));
  }
  const std::vector<RankRecord>& ranks = reduces ? setup_.view.own : setup_.view.peer;
  check_caller(caller, reduces ? identity().job : setup_.view.peer_job, ranks);
  auto& links = reduces ? owners_ : receivers_;
  const Rank rank = caller.hello.rank;
  if (links.contains(rank))
    fail(ErrorCode::kAlreadyExists, "{}: {} is attached already", describe(), caller.link->name());
  caller.link->watch_worker(ranks[static_cast<size_t>(rank)].worker);
  std::vector<ServedRoute> served = served_to(caller);
  links.emplace(rank,
                std::make_unique<SourceLink>(*setup_.agent, *setup_.runs, *this, std::move(caller), std::move(served),
                                             reduces ? 1 : setup_.slots, setup_.agreement.digest && !reduces));
}

bool SenderSession::is_receiver(const SourceLink& link) const {
  const auto it = receivers_.find(link.rank());
  return it != receivers_.end() && it->second.get() == &link;
}

RankShare SenderSession::share() const {
  RankShare share = quantizer_ ? quantizer_->share() : RankShare{};
  share.bytes = rank_bytes_;
  return share;
}

void SenderSession::on_source_ready(SourceLink& link) {
  if (link.rings()) setup_.on_allocation();
  if (is_receiver(link)) rank_bytes_ += link.bytes();
  attached_one();
}

void SenderSession::attached_one() {
  if (unready().empty()) build_digest_programs();
  readiness_changed();
}

void SenderSession::build_digest_programs() {
  if (!setup_.agreement.digest || slots_.front().run) return;
  std::vector<bool> wanted(setup_.routes.sent.size(), false);
  for (const auto& [rank, link] : receivers_)
    if (!link->digests_itself())
      for (const LinkRoute& route : setup_.routes.by_peer[static_cast<size_t>(rank)])
        wanted[route.route] = !quantises(route.route) && !(delta_ && !staged());
  for (uint32_t i = 0; i < wanted.size(); ++i)
    if (wanted[i]) digested_.push_back(i);
  for (uint32_t index = 0; index < slots_.size(); ++index) {
    std::vector<SourceRoute> routes;
    for (const uint32_t i : digested_) routes.push_back(sent_route(i, index).route);
    Slot& slot = slots_[index];
    slot.done = std::make_unique<LoopSignal>(loop(), [this, index] { on_digests(index); });
    const auto done = [signal = slot.done.get()] { signal->raise(); };
    slot.run = setup_.runs->make_digests(routes, done);
  }
}

// --- offering ------------------------------------------------------------------------------------

SenderSession::Slot* SenderSession::slot_of(int64_t version) {
  const auto it = std::ranges::find(slots_, version, &Slot::version);
  return it == slots_.end() || version == 0 ? nullptr : &*it;
}

const SenderSession::Slot* SenderSession::slot_of(int64_t version) const {
  return const_cast<SenderSession*>(this)->slot_of(version);
}

void SenderSession::offer(int64_t version) {
  prepare_offer(version, 0);
}

void SenderSession::prepare(int64_t version, uint32_t slot) {
  prepare_offer(version, slot);
}

void SenderSession::passed(int64_t version) {
  if (quantizer_ && version > 0) quantizer_->exchange().passed(version);
}

void SenderSession::prepare_offer(int64_t version, uint32_t slot) {
  offering_ = version;
  offering_slot_ = slot;
  failure_ = {};
  failure_cause_ = {};
  last_activity_ = Clock::steady().now();
  for (const auto& [rank, link] : owners_) link->offer(version, 0);
  phase_ = Phase::kPreparing;
  reduced_ = false;
  copied_ = !staged();
  quantising_ = false;
  quantised_ = quantizer_ == nullptr;
  comparing_ = false;
  compared_ = delta_ == nullptr;
  if (reducer_)
    reducer_->start(version, slot);
  else
    on_reduced({});
}

void SenderSession::on_reduced(const Status& status) {
  if (phase_ != Phase::kPreparing) return check_ended();
  if (!status.ok()) return fail_offer(status);
  reduced_ = true;
  advance();
}

void SenderSession::copied(const Status& status) {
  if (phase_ != Phase::kPreparing) return;
  if (!status.ok()) return fail_offer(status);
  copied_ = true;
  advance();
}

void SenderSession::on_quantized(const Status& status) {
  if (phase_ != Phase::kPreparing) return check_ended();
  if (!status.ok()) return fail_offer(status);
  quantised_ = true;
  advance();
}

void SenderSession::on_compared(const Status& status) {
  if (phase_ != Phase::kPreparing) return check_ended();
  if (!status.ok()) return fail_offer(status);
  compared_ = true;
  advance();
}

void SenderSession::advance() {
  if (!reduced_) return;
  if (!quantised_ || !compared_) {
    if (!copied_) return;
    if (quantizer_ && !std::exchange(quantising_, true)) quantizer_->start(offering_, offering_slot_);
    if (delta_ && !std::exchange(comparing_, true)) delta_->start(offering_slot_);
    return;
  }
  if (staged()) return check_ended();
  phase_ = Phase::kOffered;
  show(offering_, 0);
  owner_.on_unpinned(*this);
}

void SenderSession::offer_slot(int64_t version, uint32_t slot) {
  show(version, slot);
}

void SenderSession::show(int64_t version, uint32_t index) {
  Slot& slot = slots_[index];
  slot.version = version;
  slot.digested = false;
  slot.compared = compared_ && delta_ && version == offering_ && index == offering_slot_ && delta_->stamp(index) != 0;
  for (const auto& [rank, link] : receivers_)
    if (link->open()) link->offer(version, index);
  if (!slot.run) return;
  if (digested_.empty() || slot.compared) {
    slot.digested = true;
    summed_slot_ = index;
    if (staged() && (quantizer_ || delta_)) owner_.on_digested(*this, version);
    return;
  }
  slot.running = true;
  slot.run->start(++offers_);
}

bool SenderSession::pinned(uint32_t index) const {
  const Slot& slot = slots_[index];
  if (slot.running || (slot.version != 0 && slot.version == held_)) return true;
  return std::ranges::any_of(receivers_, [&](const auto& entry) {
    return entry.second->open() && slot.version != 0 && entry.second->taking() == slot.version;
  });
}

void SenderSession::clear(uint32_t index) {
  const int64_t version = std::exchange(slots_[index].version, 0);
  if (version == 0) return;
  for (const auto& [rank, link] : receivers_)
    if (link->open()) link->withdraw(version);
}

// --- being read ----------------------------------------------------------------------------------

Status SenderSession::why_withdrawn() const {
  return leaving_.ok() ? failed(ErrorCode::kCancelled, "it was withdrawn") : leaving_;
}

void SenderSession::on_hold(SourceLink& link, int64_t version, uint32_t epoch) {
  if (link.rank() != 0 || !is_receiver(link))
    fail(ErrorCode::kMismatch, "Hold of version {}: rank 0 of the receivers chooses", version);
  const bool gone = slot_of(version) == nullptr || phase_ == Phase::kFailing || broken();
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
  const auto [version, epoch, held] = take;
  const bool reduces = !is_receiver(link);
  const Slot* slot = slot_of(version);
  const bool on_offer = reduces
                            ? version == offering_ && (phase_ == Phase::kPreparing || phase_ == Phase::kOffered)
                            : slot != nullptr && (staged() ? !broken() || version == held_ : phase_ == Phase::kOffered);
  if (!on_offer) {
    const bool given_up = version == offering_ && !failure_cause_.ok();
    return link.refuse(version, epoch, given_up ? failure_cause_ : why_withdrawn());
  }
  last_activity_ = Clock::steady().now();
  if (!reduces) held_ = version;
  if (reduces)
    link.grant(version, epoch, 0, {});
  else
    grant(link, take, index_of(*slot));
  if (!reduces) owner_.on_begun(version);
  owner_.on_taking(*this);
  if (!reduces && slot->digested) send_digests(link, *slot);
}

// Deltas are of use only on top of what they were made from.
void SenderSession::grant(SourceLink& link, const Take& take, uint32_t index) {
  deltas_.clear();
  if (!slots_[index].compared) return link.grant(take.version, take.epoch, 0, deltas_);
  const Stamp base = delta_->base(index);
  if (base != 0 && take.held != 0 && (take.held == base || mutated(Mutation::kStaleBase)))
    for (const LinkRoute& route : setup_.routes.by_peer[static_cast<size_t>(link.rank())])
      deltas_.push_back(delta_->delta_bytes(route.route, index));
  link.grant(take.version, take.epoch, delta_->stamp(index), deltas_);
}

void SenderSession::on_digests(uint32_t index) {
  Slot& slot = slots_[index];
  slot.running = false;
  slot.digested = slot.run->status().ok();
  for (const auto& [rank, link] : receivers_)
    if (slot.digested && slot.version != 0 && link->taking() == slot.version) send_digests(*link, slot);
  if (slot.digested && staged()) {
    summed_slot_ = index;
    owner_.on_digested(*this, slot.version);
  }
  check_ended();
  if (staged()) owner_.on_unpinned(*this);
}

void SenderSession::send_digests(SourceLink& link, const Slot& slot) {
  if (link.digests_itself() || !setup_.agreement.digest) return;
  const std::vector<LinkRoute>& routes = setup_.routes.by_peer[static_cast<size_t>(link.rank())];
  const std::span<const Digest> digests = slot.run->digests();
  for (size_t i = 0; i < routes.size(); ++i) {
    if (quantises(routes[i].route) || slot.compared) continue;
    const auto at = std::ranges::lower_bound(digested_, routes[i].route);
    link.digests()[i] = digests[static_cast<size_t>(at - digested_.begin())];
  }
  add_quantised_digests(link, slot);
  add_delta_digests(link, slot);
  link.send_digests(slot.version);
}

void SenderSession::add_delta_digests(SourceLink& link, const Slot& slot) {
  if (!slot.compared) return;
  const std::vector<LinkRoute>& routes = setup_.routes.by_peer[static_cast<size_t>(link.rank())];
  const auto quantised = [&](const LinkRoute& route) { return quantises(route.route); };
  size_t piece = routes.size() + static_cast<size_t>(std::ranges::count_if(routes, quantised));
  for (size_t i = 0; i < routes.size(); ++i) {
    if (quantised(routes[i])) continue;
    link.digests()[i] = delta_->digest(routes[i].route, index_of(slot));
    if (delta_->is_cast(routes[i].route))
      link.digests()[piece++] = delta_->piece_digest(routes[i].route, index_of(slot));
  }
}

void SenderSession::add_quantised_digests(SourceLink& link, const Slot& slot) {
  if (!quantizer_) return;
  const std::vector<LinkRoute>& routes = setup_.routes.by_peer[static_cast<size_t>(link.rank())];
  size_t rest = routes.size();
  for (size_t i = 0; i < routes.size(); ++i) {
    if (!quantises(routes[i].route)) continue;
    link.digests()[i] = quantizer_->digest(routes[i].route, index_of(slot));
    link.digests()[rest++] = quantizer_->rest(routes[i].route, index_of(slot));
  }
}

void SenderSession::on_source_run_done(SourceLink& link) {
  const Status status = link.run()->status();
  if (!status.ok() && phase_ == Phase::kOffered && link.open()) {
    fail_offer(status);
  } else if (status.ok() && link.taking() != 0 && link.digests_itself() && !link.run_digests().empty()) {
    if (const Slot* slot = slot_of(link.taking()); slot != nullptr && is_receiver(link)) {
      add_quantised_digests(link, *slot);
      add_delta_digests(link, *slot);
    }
    link.send_digests(link.taking());
  }
  check_ended();
}

void SenderSession::on_progress(SourceLink&) {
  last_activity_ = Clock::steady().now();
}

void SenderSession::on_done(SourceLink& link, const Done& done) {
  last_activity_ = Clock::steady().now();
  if (done.status.ok()) {
    if (is_receiver(link)) setup_.on_moved(link.granted_bytes(), link.deltas());
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

bool SenderSession::reading() const {
  for (const auto* links : {&receivers_, &owners_})
    for (const auto& [rank, link] : *links)
      if (link->running() || (link->open() && link->taking() != 0)) return true;
  return false;
}

// Staged, a receiver is waited for only where its slot is needed: see SenderBatch::check_peers().
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
  if (reducer_ && reducer_->busy())
    for (const auto& link : reducer_->links()) links.push_back(link->connection());
  if (quantizer_)
    for (Link* link : quantizer_->exchange().awaited_links()) links.push_back(link);
  return links;
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
  const bool compared = slots_[summed_slot_].compared && setup_.agreement.digest;
  for (uint32_t i = 0; compared && i < setup_.routes.sent.size(); ++i)
    if (!quantises(i)) add(i, delta_->digest(i, summed_slot_));
  for (size_t i = 0; !compared && i < digested_.size(); ++i) add(digested_[i], slots_[summed_slot_].run->digests()[i]);
  for (uint32_t i = 0; i < setup_.routes.sent.size() && setup_.agreement.digest; ++i)
    if (quantises(i)) add(i, quantizer_->digest(i, summed_slot_));
  for (const auto& [rank, link] : receivers_) {
    const std::span<const Digest> digests = link->run_digests();
    for (size_t i = 0; i < digests.size(); ++i)
      if (digests[i].elements != 0) add(setup_.routes.by_peer[static_cast<size_t>(rank)][i].route, digests[i]);
  }
}

}  // namespace tessera::bus
