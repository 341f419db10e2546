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
    : owner_(owner),
      rank_(rank),
      worker_(record.worker),
      options_(std::move(options)),
      run_done_(agent.loop(), [this] { handle_run_done(); }),
      exchange_(factory, {.process = record.incarnation, .name = rank_name(peer_job, rank)}, std::move(routes),
                {.digest = options_.digest, .deltas = options_.delta, .runs = options_.runs},
                [this] { run_done_.raise(); }),
      digests_(exchange_),
      deltas_(exchange_) {}

PullLink::~PullLink() {
  if (link_) link_->close();
}

void PullLink::adopt(std::shared_ptr<Link> link) {
  link_ = std::move(link);
  link_->set_handlers([this](Frame& frame) { handle(frame); }, [this](const Status& status) { lose(status); },
                      [this](const Detach& detach) { handle_detach(detach); },
                      [this](const Status& status) { owner_.on_pull_broken(*this, status); });
  link_->watch_process(exchange_.peer().process);
  link_->watch_worker(worker_);
}

void PullLink::handle(Frame& frame) {
  switch (frame.type) {
    case kCode<Attached>:
      return exchange_.handle_attached(*link_, frame);
    case kCode<Prepared>:
      return handle_prepared(frame);
    case kCode<Offer>:
      return handle_offer(parse<Offer>(frame.payload));
    case kCode<Withdraw>:
      return withdraw_offer(parse<Withdraw>(frame.payload).version);
    case kCode<Held>:
      return handle_held(parse<Held>(frame.payload));
    case kCode<Grant>:
      return handle_grant(parse<Grant>(frame.payload, deltas_.room()));
    case kCode<Refuse>:
      return handle_refuse(parse<Refuse>(frame.payload));
    case kCode<Revoke>:
      return handle_revoke(parse<Revoke>(frame.payload));
    case kCode<Digests>:
      return handle_digests(parse<Digests>(frame.payload, digests_.room()));
    default:
      fail(ErrorCode::kMismatch, "unexpected message {}"_message, frame.type);
  }
}

Status PullLink::given_up(int64_t version, const Status& reason) const {
  const bool told = !reason.ok() && !reason.message().empty();
  return failed(told ? reason.code() : ErrorCode::kPeerLost, "{} has given up version {}{}{}"_message, name(), version,
                told ? ": " : "", told ? reason.message() : "");
}

void PullLink::handle_prepared(Frame& frame) {
  exchange_.handle_prepared(frame);
  if (options_.runs) run_ = &exchange_.run(slot_);
  offers_.reserve(kMaxSlots);
  owner_.on_pull_ready(*this);
}

RankShare PullLink::share() const {
  RankShare share{.bytes = bytes()};
  for (const uint32_t i : exchange_.pulled())
    if (const auto& piece = exchange_.routes()[i].route.wire) share.add(*piece);
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
  if (!ready() || offer.slot >= exchange_.slots() || offer.version <= offered())
    fail(ErrorCode::kMismatch, "Offer of version {} in slot {} out of turn"_message, offer.version, offer.slot);
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
  hold_ = {.state = HoldState::kAsked, .version = version, .epoch = epoch};
  link_->ask<Held, Refuse>(Hold{.version = version, .epoch = epoch});
}

void PullLink::handle_held(const Held& held) {
  if (hold_.state != HoldState::kAsked || held.epoch != hold_.epoch) return;  // released since
  hold_.state = HoldState::kHeld;
  owner_.on_held(*this, true);
}

void PullLink::release() {
  const Holding held = std::exchange(hold_, {});
  if (held.state == HoldState::kNone || !open()) return;
  link_->send(Release{.version = held.version, .epoch = held.epoch});
}

void PullLink::take(int64_t version, uint32_t epoch, bool lease) {
  TESSERA_CHECK(state_ == State::kIdle && !lease_.lasts);
  TESSERA_CHECK(!lease || direct());
  lease_ = {.asked = lease};
  state_ = State::kAsked;
  taking_ = version;
  epoch_ = epoch;
  digests_.begin();
  abort_status_ = {};
  hold_ = {};
  Trace::begin("take", track_, {.subject = name(), .version = version});
  link_->ask<Grant, Refuse>(Take{.version = version, .epoch = epoch, .held = deltas_.held(), .lease = lease});
}

void PullLink::handle_grant(Grant grant) {
  // A Grant that comes after abort() is of no use any more.
  if (state_ != State::kAsked || grant.epoch != epoch_) return deltas_.give_back(std::move(grant));
  if (options_.runs && exchange_.slots() > 1) {
    // Only now: rank 0 may have known of the version, and chosen it, before its Offer was here.
    const auto offered = std::ranges::find(offers_, taking_, &Offered::version);
    if (offered == offers_.end()) fail(ErrorCode::kMismatch, "Grant of version {} in no slot"_message, taking_);
    slot_ = offered->slot;
    run_ = lease_.asked ? &exchange_.direct_run(slot_, Pass::kDigest) : &exchange_.run(slot_);
  }
  deltas_.begin(std::move(grant));
  if (options_.delta) exchange_.travel(slot_, deltas_.travel(), deltas_.bytes_of_deltas());
  state_ = State::kPulling;
  owner_.on_granted(*this);
  if (!options_.runs) return;
  if (program()->routes() == 0 || (lease_.asked && !options_.digest)) return handle_run_done();
  run_->start(epoch_, seed_of_version(options_.sample, taking_));
  if (deltas().routes > 0) fail_point("delta: applying");
}

void PullLink::handle_refuse(const Refuse& refuse) {
  if (hold_.state == HoldState::kAsked && refuse.epoch == hold_.epoch) {
    const Holding held = std::exchange(hold_, {});
    std::erase_if(offers_, [&](const Offered& offered) { return offered.version == held.version; });
    return owner_.on_held(*this, false);
  }
  if (state_ == State::kAsked && refuse.epoch == epoch_) end_pull(given_up(refuse.version, refuse.reason));
}

void PullLink::handle_revoke(const Revoke& revoke) {
  if (taking_ != 0 && revoke.epoch == epoch_) abort(given_up(revoke.version, revoke.reason));
}

void PullLink::handle_digests(Digests digests) {
  if (taking_ == 0 || digests.version != taking_) return;  // of a pull that has failed here in the meantime
  digests_.receive(std::move(digests), seed_of_version(options_.sample, taking_));
  if (state_ == State::kChecking) check_digests();
}

void PullLink::handle_detach(const Detach& detach) {
  const Status reason = detach.reason(name());
  offers_.clear();
  if (busy()) abort(reason);
  owner_.on_pull_detached(*this, reason);
}

void PullLink::handle_run_done() {
  if (state_ == State::kCopying) return end_copy();
  if (state_ != State::kPulling) return;
  const bool ran = program()->routes() != 0 && (!lease_.asked || options_.digest);
  const Status status = ran ? run_->status() : Status();
  if (!ran || !status.ok()) return end_pull(status);
  if (!options_.digest) {
    // No digest covers what was read after the source gave up waiting for this rank, which may have been stopped.
    link_->poll();
    return end_pull(abort_status_);
  }
  state_ = State::kChecking;
  if (!abort_status_.ok()) return end_pull(abort_status_);
  if (digests_.have()) check_digests();
}

void PullLink::check_digests() {
  bool incomplete = false;
  for (size_t i = 0; i < exchange_.pulled().size(); ++i) {
    const Travel travel = deltas_.travel_of(i);
    if (travel == Travel::kNot || !digests_.compares(i)) continue;  // it agreed before, or is not in the sample
    const auto place = digests_.differing(i, travel == Travel::kDelta, run_->digests());
    if (!place) {
      deltas_.arrived(i);
      continue;
    }
    if (travel == Travel::kDelta) {
      incomplete = true;
      give_up_delta(i);
      continue;
    }
    Metrics::process().digest_mismatches.add();
    const PullRoute& route = route_at(i);
    const Region& region = route.wire ? route.wire->what().region : route.what.region;
    return end_pull(
        failed(ErrorCode::kDataLoss,
               "digest of tensor {} {} differs: {} sent {}, {} arrived; the memory was written while it was "
               "offered, or the copy failed"_message,
               options_.tensor_name(route.what.tensor), region.to_string(), name(), digests_.sent(*place).to_string(),
               run_->digests()[place->own].to_string()));
  }
  return incomplete ? pull_rest() : end_pull({});
}

// Pulls again what did not agree. For a stream that is everything, in full: its source packs all of it once more.
void PullLink::pull_rest() {
  uint32_t epoch = epoch_;
  if (streams()) {
    deltas_.give_up_streamed();
    epoch |= Take::kSecondFill;
    link_->send(Take{.version = taking_, .epoch = epoch_, .held = 0});
  }
  exchange_.travel(slot_, deltas_.travel(), deltas_.bytes_of_deltas());
  state_ = State::kPulling;
  run_->start(epoch, seed_of_version(options_.sample, taking_));
}

// The destination was written since the last transfer, or the delta while it was read: pulls it again, in full.
void PullLink::give_up_delta(size_t position) {
  deltas_.give_up(position);
  const PullRoute& route = route_at(position);
  log_event(LogLevel::warn, "delta.mismatch", {{"peer", name()}, {"version", taking_}},
            "tensor {} {} is taken in full: with the delta it was not what was sent, because it was written since the "
            "last transfer"_message,
            options_.tensor_name(route.what.tensor), route.what.region.to_string());
}

void PullLink::end_pull(const Status& status) {
  const int64_t version = taking_;
  state_ = State::kIdle;
  taking_ = 0;
  Trace::end("take", track_, {.version = version, .bytes = bytes_done()});
  if (status.ok()) {
    pulled_ = version;
    deltas_.complete();
    if (exchange_.slots() == 1)
      std::erase_if(offers_, [&](const Offered& offered) { return offered.version == version; });
  }
  lease_.lasts = lease_.asked && status.ok();
  if (!lease_.lasts) send_done(version, status);
  owner_.on_pulled(*this, status);
}

void PullLink::copy(Target target) {
  TESSERA_CHECK(lease_.lasts);
  state_ = State::kCopying;
  lease_.copied = true;
  if (program()->routes() == 0) return end_copy();
  run_ = target == Target::kRegistered ? &exchange_.direct_run(slot_, Pass::kCopy) : &exchange_.run(slot_);
  run_->start(epoch_);
}

// It cannot fail: what is mapped stays, whatever becomes of the source.
void PullLink::end_copy() {
  state_ = State::kIdle;
  end_lease({});
  owner_.on_copied(*this);
}

void PullLink::end_lease(const Status& status) {
  if (std::exchange(lease_.lasts, false)) send_done(pulled_, status);
}

// Of a lease, first what is digested counts, then what is copied: half each, if there are digests.
int64_t PullLink::bytes_done() const {
  if (run_ == nullptr || state_ == State::kAsked) return 0;
  const int64_t done = run_->bytes_done();
  if (!lease_.asked) return done;
  if (!options_.digest) return lease_.copied ? done : 0;
  return ((lease_.copied ? bytes() : 0) + done) / 2;
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

void PullLink::tell_ahead(int64_t version, bool keeps_pace) {
  if (!open() || offers_.empty() || version <= offered()) return;
  if (busy() || lease_.lasts || hold_.state != HoldState::kNone) return;
  if (exchange_.slots() > 1 && !keeps_pace) return;
  if (std::exchange(offers_.back().ahead, version) != version) link_->send(Ahead{.version = version});
}

void PullLink::abort(const Status& status) {
  switch (state_) {
    case State::kIdle:
    case State::kCopying:
      return;
    case State::kAsked:
      // A Grant may be on its way: the source assumes that we read until it gets Done.
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

// Once they have been compared, they are equal to the source's.
void PullLink::add_digests(std::span<Digest> sums) const {
  if (digests_.have()) digests_.add_to(sums);
}

}  // namespace tessera::bus
