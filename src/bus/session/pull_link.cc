#include "bus/session/pull_link.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/fail.h"
#include "base/fail_point.h"
#include "base/log.h"
#include "base/metrics.h"
#include "base/socket.h"
#include "exec/wire/wire_piece.h"

namespace tessera::bus {
PullLink::PullLink(Agent& agent, RunFactory& factory, PullLinkOwner& owner, const std::string& peer_job, Rank rank,
                   const RankRecord& record, std::vector<WantedRoute> routes, PullLinkOptions options)
    : agent_(agent),
      factory_(factory),
      owner_(owner),
      rank_(rank),
      name_(rank_name(peer_job, rank)),
      incarnation_(record.incarnation),
      worker_(record.worker),
      routes_(std::move(routes)),
      options_(std::move(options)),
      run_done_(agent.loop(), [this] { handle_run_done(); }) {}

PullLink::~PullLink() {
  if (link_) link_->close();
}

void PullLink::adopt(std::shared_ptr<Link> link) {
  link_ = std::move(link);
  link_->set_handlers([this](Frame& frame) { handle(frame); }, [this](const Status& status) { lose(status); },
                      [this](const Detach& detach) { handle_detach(detach); },
                      [this](const Status& status) { owner_.on_pull_broken(*this, status); });
  link_->watch_process(incarnation_);
  link_->watch_worker(worker_);
}

void PullLink::handle(Frame& frame) {
  switch (frame.type) {
    case kCode<Attached>:
      return handle_attached(frame);
    case kCode<Prepared>:
      return handle_prepared(frame);
    case kCode<Offer>:
      return handle_offer(parse<Offer>(frame.payload));
    case kCode<Withdraw>:
      return withdraw_offer(parse<Withdraw>(frame.payload).version);
    case kCode<Held>:
      return handle_held(parse<Held>(frame.payload));
    case kCode<Grant>:
      return handle_grant(parse<Grant>(frame.payload, {.deltas = std::move(granted_deltas_)}));
    case kCode<Refuse>:
      return handle_refuse(parse<Refuse>(frame.payload));
    case kCode<Revoke>:
      return handle_revoke(parse<Revoke>(frame.payload));
    case kCode<Digests>:
      return handle_digests(parse<Digests>(frame.payload, {.digests = std::move(spare_digests_)}));
    default:
      fail(ErrorCode::kMismatch, "unexpected message {}", frame.type);
  }
}

void PullLink::handle_attached(Frame& frame) {
  if (pulls_) fail(ErrorCode::kMismatch, "Attached out of turn");
  Attached part = parse<Attached>(frame.payload);
  attach_fds(part.keys, std::move(frame.fds));
  if (attached_.keys.size() + part.keys.size() > kMaxKeys)
    fail(ErrorCode::kMismatch, "Attached: {} keys and {} more, at most {}", attached_.keys.size(), part.keys.size(),
         kMaxKeys);
  std::ranges::move(part.keys, std::back_inserter(attached_.keys));
  if (part.more_keys) return;
  attached_.slots = part.slots;
  attached_.places = std::move(part.places);
  build();
}

std::vector<PullRoute> PullLink::place_routes(Prepare& prepare, std::vector<SlotBytes>& slot_bytes) {
  std::vector<PullRoute> routes;
  const Attached::Place* place = nullptr;
  size_t next_place = 0;
  for (uint32_t i = 0; i < routes_.size(); ++i) {
    WantedRoute& wanted = routes_[i];
    const bool same = i > 0 && !wanted.per_route && !routes_[i - 1].per_route &&
                      routes_[i - 1].route.what.tensor == wanted.route.what.tensor;
    if (!same) {
      if (next_place == attached_.places.size())
        fail(ErrorCode::kMismatch, "places for {} tensors, more are needed", attached_.places.size());
      place = &attached_.places[next_place++];
    }
    if (place->strides.size() != wanted.route.what.shape.size())
      fail(ErrorCode::kMismatch, "a place of {} dims for a tensor of {}", place->strides.size(),
           wanted.route.what.shape.size());
    if (may_be_delta(wanted) != place->delta.has_value())
      fail(ErrorCode::kMismatch, "tensor {}: a place {} a delta", wanted.route.what.tensor,
           place->delta ? "with" : "without");
    if (wanted.skipped) {
      prepare.skipped.push_back(i);
      continue;
    }
    PullRoute route = wanted.route;
    route.memory = place->memory;
    route.origin = place->origin;
    route.src.strides = place->strides;
    route.delta = place->delta;
    // In place it is the copy of what was sent last that is read.
    if (route.delta && attached_.slots == 1) route.src.owned = route.what.region;
    routes.push_back(std::move(route));
    slot_bytes.push_back({place->slot_bytes, place->delta_slot_bytes});
    program_routes_.push_back(i);
  }
  if (next_place != attached_.places.size())
    fail(ErrorCode::kMismatch, "places for {} tensors where {} are needed", attached_.places.size(), next_place);
  return routes;
}

void PullLink::build() {
  std::unique_ptr<PullRuns> pulls =
      factory_.make_pull({.process = incarnation_, .name = name_}, std::move(attached_.keys), options_.digest);
  Prepare prepare;
  std::vector<SlotBytes> slot_bytes;
  std::vector<PullRoute> routes = place_routes(prepare, slot_bytes);
  for (uint32_t slot = 0; slot < attached_.slots; ++slot) {
    for (size_t i = 0; slot > 0 && i < routes.size(); ++i)
      if (__builtin_add_overflow(routes[i].memory.offset, slot_bytes[i].memory, &routes[i].memory.offset) ||
          (routes[i].delta &&
           __builtin_add_overflow(routes[i].delta->offset, slot_bytes[i].delta, &routes[i].delta->offset)))
        fail(ErrorCode::kMismatch, "slots of {} and {} bytes", slot_bytes[i].memory, slot_bytes[i].delta);
    pulls->add_slot(routes);
  }
  pulls_ = std::move(pulls);
  number_digests();
  if (options_.delta) travel_.resize(program_routes_.size());
  if (options_.delta) travel_bytes_.resize(program_routes_.size());
  attached_ = {};
  prepare.stream = streams();
  link_->send(prepare);
}

// Of pieces of deltas a source has digests only where they are cast, a run has them anyway.
void PullLink::number_digests() {
  std::vector<SecondDigest> sent, own;
  for (const WantedRoute& wanted : routes_) {
    const bool cast = wanted.route.dst_dtype != wanted.route.what.dtype;
    const SecondDigest second = wanted.route.wire      ? SecondDigest::kRest
                                : may_be_delta(wanted) ? SecondDigest::kPiece
                                                       : SecondDigest::kNone;
    sent.push_back(second == SecondDigest::kPiece && !cast ? SecondDigest::kNone : second);
    if (!wanted.skipped) own.push_back(second);
  }
  sent_digests_ = DigestTable(sent);
  own_digests_ = DigestTable(own);
}

Status PullLink::given_up(int64_t version, const Status& reason) const {
  const bool told = !reason.ok() && !reason.message().empty();
  return failed(told ? reason.code() : ErrorCode::kPeerLost, "{} has given up version {}{}{}", name_, version,
                told ? ": " : "", told ? reason.message() : "");
}

void PullLink::handle_prepared(Frame& frame) {
  if (ready_ || !pulls_) fail(ErrorCode::kMismatch, "Prepared out of turn");
  if (frame.fds.empty() == streams()) fail(ErrorCode::kMismatch, "Prepared with {} descriptors", frame.fds.size());
  StreamEnd end{.fds = std::move(frame.fds)};
  if (options_.runs) {
    pulls_->make_runs(std::move(end), [this] { run_done_.raise(); });
    run_ = &pulls_->run(slot_);
  } else if (streams()) {
    stream_ = pulls_->open_stream(std::move(end));
  }
  offers_.reserve(kMaxSlots);
  ready_ = true;
  owner_.on_pull_ready(*this);
}

const std::shared_ptr<const PullProgram>& PullLink::program() const {
  static const std::shared_ptr<const PullProgram> none;
  return pulls_ ? pulls_->program(0) : none;
}

RankShare PullLink::share() const {
  RankShare share{.bytes = bytes()};
  for (const uint32_t i : program_routes_)
    if (const auto& piece = routes_[i].route.wire) share.add(*piece);
  return share;
}

bool PullLink::offers(int64_t version) const {
  return std::ranges::find(offers_, version, &Offered::version) != offers_.end();
}

int64_t PullLink::newest_below(int64_t version) const {
  int64_t newest = 0;
  for (const Offered& offered : offers_)
    if (offered.version < version) newest = offered.version;
  return newest;
}

void PullLink::handle_offer(const Offer& offer) {
  if (!ready_ || offer.slot >= pulls_->slots() || offer.version <= offered())
    fail(ErrorCode::kMismatch, "Offer of version {} in slot {} out of turn", offer.version, offer.slot);
  std::erase_if(offers_, [&](const Offered& other) { return other.slot == offer.slot; });
  offers_.push_back({.version = offer.version, .slot = offer.slot});
  owner_.on_offer(*this);
}

void PullLink::withdraw_offer(int64_t version) {
  if (std::erase_if(offers_, [&](const Offered& offered) { return offered.version == version; }) == 0) return;
  owner_.on_withdrawn(*this, version);
  owner_.on_offer(*this);
}

void PullLink::hold(int64_t version, uint32_t epoch) {
  hold_ = HoldState::kAsked;
  hold_version_ = version;
  hold_epoch_ = epoch;
  link_->send(Hold{.version = version, .epoch = epoch});
}

void PullLink::handle_held(const Held& held) {
  if (hold_ != HoldState::kAsked || held.epoch != hold_epoch_) return;  // released since
  hold_ = HoldState::kHeld;
  owner_.on_held(*this, true);
}

void PullLink::release() {
  if (std::exchange(hold_, HoldState::kNone) == HoldState::kNone || !open()) return;
  link_->send(Release{.version = hold_version_, .epoch = hold_epoch_});
}

void PullLink::take(int64_t version, uint32_t epoch) {
  TESSERA_CHECK(state_ == State::kIdle);
  state_ = State::kAsked;
  taking_ = version;
  epoch_ = epoch;
  have_digests_ = false;
  abort_status_ = {};
  hold_ = HoldState::kNone;
  Trace::begin("take", track_, {.subject = name_, .version = version});
  link_->send(Take{.version = version, .epoch = epoch, .held = held_});
}

void PullLink::handle_grant(Grant grant) {
  // One that comes after abort() is of no use any more.
  if (state_ != State::kAsked || grant.epoch != epoch_) {
    granted_deltas_ = std::move(grant.deltas);
    return;
  }
  if (options_.runs && pulls_->slots() > 1) {
    // Not before: rank 0 may have heard of the version, and have chosen it, before its Offer was here.
    const auto offered = std::ranges::find(offers_, taking_, &Offered::version);
    if (offered == offers_.end()) fail(ErrorCode::kMismatch, "Grant of version {} in no slot", taking_);
    slot_ = offered->slot;
    run_ = &pulls_->run(slot_);
  }
  granted_deltas_ = std::move(grant.deltas);
  granted_ = grant.stamp;
  choose_travel();
  state_ = State::kPulling;
  owner_.on_granted(*this);
  if (!options_.runs) return;
  if (program()->routes() == 0) return handle_run_done();
  run_->start(epoch_);
  if (deltas_.routes > 0) fail_point("delta: applying");
}

// Nothing is held until all of it is there.
void PullLink::choose_travel() {
  const Stamp held = std::exchange(held_, 0);
  deltas_ = {};
  if (!granted_deltas_.empty() && (!options_.delta || held == 0 || granted_deltas_.size() != routes_.size()))
    fail(ErrorCode::kMismatch, "Grant with {} deltas for {} routes, on top of {}", granted_deltas_.size(),
         routes_.size(), held);
  if (!options_.delta) return;
  std::ranges::fill(travel_, Travel::kFull);
  for (size_t i = 0; i < program_routes_.size() && !granted_deltas_.empty(); ++i) {
    const int64_t bytes = granted_deltas_[program_routes_[i]];
    if (bytes == Grant::kInFull) continue;
    const int64_t full = program()->bytes_of(i);
    if (!may_be_delta(routes_[program_routes_[i]]) || bytes > full)
      fail(ErrorCode::kMismatch, "Grant with a delta of {} bytes for a route of {}", bytes, full);
    travel_[i] = Travel::kDelta;
    travel_bytes_[i] = bytes;
    deltas_ += {1, bytes, full};
  }
  pulls_->travel(slot_, travel_, travel_bytes_);
}

void PullLink::handle_refuse(const Refuse& refuse) {
  if (hold_ == HoldState::kAsked && refuse.epoch == hold_epoch_) {
    hold_ = HoldState::kNone;
    std::erase_if(offers_, [&](const Offered& offered) { return offered.version == hold_version_; });
    return owner_.on_held(*this, false);
  }
  if (state_ == State::kAsked && refuse.epoch == epoch_) end_pull(given_up(refuse.version, refuse.reason));
}

void PullLink::handle_revoke(const Revoke& revoke) {
  if (taking_ != 0 && revoke.epoch == epoch_) abort(given_up(revoke.version, revoke.reason));
}

void PullLink::handle_digests(Digests digests) {
  if (taking_ == 0 || digests.version != taking_) return;  // of a pull that has failed here meanwhile
  if (digests.digests.size() != sent_digests_.size() || have_digests_)
    fail(ErrorCode::kMismatch, "{} digests for {} routes, there are {}", digests.digests.size(), routes_.size(),
         sent_digests_.size());
  spare_digests_ = std::exchange(digests_, std::move(digests.digests));
  have_digests_ = true;
  if (state_ == State::kChecking) check_digests();
}

void PullLink::handle_detach(const Detach& detach) {
  const Status reason = detach.reason(name_);
  offers_.clear();
  if (busy()) abort(reason);
  owner_.on_pull_detached(*this, reason);
}

void PullLink::handle_run_done() {
  if (state_ != State::kPulling) return;
  const Status status = program()->routes() == 0 ? Status() : run_->status();
  if (!status.ok()) return end_pull(status);
  if (program()->routes() == 0) return end_pull({});
  if (!options_.digest) {
    // No digest tells what was read after the source gave up waiting for this rank, which was stopped perhaps.
    link_->poll();
    return end_pull(abort_status_);
  }
  state_ = State::kChecking;
  if (!abort_status_.ok()) return end_pull(abort_status_);
  if (have_digests_) check_digests();
}

std::optional<PullLink::DigestPlace> PullLink::differing(size_t position) const {
  const std::span<const Digest> own = run_->digests();
  const uint32_t route = program_routes_[position];
  const auto differ = [&](const DigestPlace& place) { return own[place.own] != digests_[place.sent]; };
  const bool piece_only = travel_of(position) == Travel::kDelta && sent_digests_.has_second(route);
  const DigestPlace whole{.own = position, .sent = route};
  if (!piece_only && differ(whole)) return whole;
  if (!piece_only && routes_[route].route.wire == nullptr) return std::nullopt;
  const DigestPlace second{.own = own_digests_.second(position), .sent = sent_digests_.second(route)};
  return differ(second) ? std::optional(second) : std::nullopt;
}

void PullLink::check_digests() {
  bool again = false;
  for (size_t i = 0; i < program_routes_.size(); ++i) {
    if (travel_of(i) == Travel::kNot) continue;  // it agreed before
    const std::optional<DigestPlace> place = differing(i);
    if (travel_of(i) == Travel::kDelta && place) {
      again = true;
      give_up_delta(i);
      continue;
    }
    if (!place) {
      if (options_.delta) travel_[i] = Travel::kNot;
      continue;
    }
    Metrics::process().digest_mismatches.add();
    const PullRoute& route = routes_[program_routes_[i]].route;
    const Region& region = route.wire ? route.wire->what().region : route.what.region;
    return end_pull(
        failed(ErrorCode::kDataLoss,
               "digest of tensor {} {} differs: {} sent {}, {} arrived; the memory was written while it was "
               "offered, or the copy failed",
               options_.tensor_name(route.what.tensor), region.to_string(), name_, digests_[place->sent].to_string(),
               run_->digests()[place->own].to_string()));
  }
  return again ? pull_rest() : end_pull({});
}

// What did not agree. Of what a stream carries that is all, in full: its source packs everything once more.
void PullLink::pull_rest() {
  uint32_t epoch = epoch_;
  if (streams()) {
    for (size_t i = 0; i < travel_.size(); ++i)
      if (program()->streams(i)) travel_[i] = Travel::kFull;
    epoch |= Take::kSecondFill;
    link_->send(Take{.version = taking_, .epoch = epoch_, .held = 0});
  }
  pulls_->travel(slot_, travel_, travel_bytes_);
  state_ = State::kPulling;
  run_->start(epoch);
}

// The destination was written since the last transfer, or the delta while it was read: once more, in full.
void PullLink::give_up_delta(size_t position) {
  travel_[position] = Travel::kFull;
  const PullRoute& route = routes_[program_routes_[position]].route;
  deltas_ += {-1, -granted_deltas_[program_routes_[position]], -program()->bytes_of(position)};
  log_event(LogLevel::warn, "delta.mismatch", {{"peer", name_}, {"version", taking_}},
            "tensor {} {} is taken in full: with what had changed it is not what was sent; it was written since the "
            "last transfer",
            options_.tensor_name(route.what.tensor), route.what.region.to_string());
}

void PullLink::end_pull(const Status& status) {
  const int64_t version = taking_;
  state_ = State::kIdle;
  taking_ = 0;
  Trace::end("take", track_, {.version = version, .bytes = bytes_done()});
  if (status.ok()) {
    pulled_ = version;
    held_ = granted_;
    if (pulls_->slots() == 1)
      std::erase_if(offers_, [&](const Offered& offered) { return offered.version == version; });
  }
  send_done(version, status);
  owner_.on_pulled(*this, status);
}

void PullLink::finish(const Status& status) {
  TESSERA_CHECK(busy());
  end_pull(status);
}

void PullLink::send_done(int64_t version, const Status& status) {
  if (open()) link_->send(Done{.version = version, .bytes = status.ok() ? bytes() : 0, .status = status});
}

void PullLink::send_progress() {
  if (open() && taking_ != 0) link_->send(ProgressReport{.version = taking_, .bytes = bytes_done()});
}

void PullLink::abort(const Status& status) {
  switch (state_) {
    case State::kIdle:
      return;
    case State::kAsked:
      // A Grant may be on its way: the source believes us to be reading until it hears Done.
      return end_pull(status);
    case State::kPulling:
      abort_status_ = status;
      if (run_ != nullptr) return run_->abort(status);
      return owner_.on_aborted(*this, status);
    case State::kChecking:
      return end_pull(status);
  }
}

void PullLink::lose(const Status& status) {
  offers_.clear();
  if (busy()) abort(status);
  owner_.on_pull_lost(*this, status);
}

void PullLink::send_broken(const Status& status) {
  if (open()) link_->send(Broken{.status = status});
}

void PullLink::detach(const Status& why) {
  if (!open()) return;
  link_->send(Detach{.status = why});
  link_->close();
}

// Once they have been compared they are the source's.
void PullLink::add_digests(std::span<Digest> sums) const {
  if (!have_digests_) return;
  for (const uint32_t position : program_routes_) sums[routes_[position].route.what.tensor] += digests_[position];
}

}  // namespace tessera::bus
