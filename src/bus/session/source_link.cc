#include "bus/session/source_link.h"

#include <algorithm>
#include <utility>

#include "base/fail.h"

namespace tessera::bus {

SourceLink::SourceLink(Agent& agent, RunFactory& factory, SourceLinkOwner& owner, Caller caller,
                       std::vector<ServedRoute> routes, uint32_t slots, const SourceLinkDigest& digest)
    : owner_(owner),
      link_(std::move(caller.link)),
      rank_(caller.hello.rank),
      sample_(digest.sample),
      run_done_(agent.loop(), [this] { handle_run_done(); }),
      exchange_(factory, {.process = caller.hello.incarnation, .name = link_->name()}, std::move(routes), slots,
                digest.on && slots == 1, [this] { run_done_.raise(); }) {
  std::vector<SecondDigest> seconds;
  for (const ServedRoute& served : exchange_.routes()) {
    seconds.push_back(served.quantised      ? SecondDigest::kRest
                      : served.delta_digest ? SecondDigest::kPiece
                                            : SecondDigest::kNone);
    digests_.sampled.add(served.route.what, served.quantised);
  }
  digests_.table = DigestTable(seconds);
  digests_.all.resize(digests_.table.size());
  digests_.message.digests.reserve(digests_.table.size());
  fill_.versions.resize(slots);
  link_->set_handlers([this](Frame& frame) { handle(frame); },
                      [this](const Status& status) { owner_.on_source_lost(*this, status); },
                      [this](const Detach& detach) {
                        left_ = detach.status.ok();
                        owner_.on_source_detached(*this, detach.reason(name()));
                      },
                      [this](const Status& status) { owner_.on_source_broken(*this, status); });
  link_->watch_process(caller.hello.incarnation);
  exchange_.attach(*link_);
}

SourceLink::~SourceLink() {
  if (link_) link_->close();
}

void SourceLink::handle(Frame& frame) {
  switch (frame.type) {
    case kCode<Prepare>:
      exchange_.handle_prepare(*link_, frame);
      return owner_.on_source_ready(*this);
    case kCode<Hold>: {
      const Hold hold = parse<Hold>(frame.payload);
      if (!ready() || hold.epoch <= epoch_)
        fail(ErrorCode::kMismatch, "Hold of version {} in epoch {} out of turn"_message, hold.version, hold.epoch);
      return owner_.on_hold(*this, hold.version, hold.epoch);
    }
    case kCode<Release>:
      (void)parse<Release>(frame.payload);
      return owner_.on_released(*this);
    case kCode<Take>:
      return handle_take(parse<Take>(frame.payload));
    case kCode<ProgressReport>: {
      const ProgressReport report = parse<ProgressReport>(frame.payload);
      if (report.version != taking_ || report.bytes <= progress_.load()) return;
      progress_ = std::min(report.bytes, bytes());
      return owner_.on_progress(*this);
    }
    case kCode<Ahead>:
      return owner_.on_ahead(*this, parse<Ahead>(frame.payload).version);
    case kCode<Done>:
      return handle_done(parse<Done>(frame.payload));
    default:
      fail(ErrorCode::kMismatch, "unexpected message {}"_message, frame.type);
  }
}

void SourceLink::handle_take(const Take& take) {
  const bool same = taking_ != 0 && take.version == taking_ && take.epoch == epoch_;
  if (streams() && same && deltas_.routes > 0 && !fill_.second) {
    fill_.second = true;
    return fill_.running ? void() : fill_again();
  }
  if (!ready() || taking_ != 0 || waiting_take_ || take.epoch <= epoch_ ||
      (take.version == done_version_ && (fill_.running || !keeps())))
    fail(ErrorCode::kMismatch, "Take of version {} in epoch {} out of turn"_message, take.version, take.epoch);
  epoch_ = take.epoch;
  leased_ = take.lease;
  if (fill_.running) {  // the puller has drained the stream; the thread that filled it has yet to say so
    waiting_take_ = take;
    return;
  }
  owner_.on_take(*this, take);
}

void SourceLink::handle_done(const Done& done) {
  if (taking_ == 0 && !done.status.ok()) {  // the puller gave up before it began
    waiting_take_.reset();
    ended_version_ = done.version;
    return owner_.on_done(*this, done);
  }
  if (done.version != taking_ || taking_ == 0)
    fail(ErrorCode::kMismatch, "Done with version {} where {} was being taken"_message, done.version, taking_);
  taking_ = 0;
  ended_version_ = done.version;
  if (done.status.ok()) {
    done_version_ = done.version;
    progress_ = bytes();
  }
  owner_.on_done(*this, done);
}

void SourceLink::start_fill(uint32_t epoch) {
  fill_.running = true;
  fill_.run->start(epoch, seed_of_version(sample_, taking_));
}

// A receiver does not hold what it claimed: its deltas are of no use.
void SourceLink::fill_again() {
  travel({});
  deltas_ = {};
  fill_.second = false;
  start_fill(epoch_ | Take::kSecondFill);
}

void SourceLink::handle_run_done() {
  fill_.running = false;
  if (fill_.second && taking_ != 0) return fill_again();
  owner_.on_source_run_done(*this);
  const std::optional<Take> take = std::exchange(waiting_take_, std::nullopt);
  if (take && link_->open()) owner_.on_take(*this, *take);
}

std::span<const Digest> SourceLink::run_digests() {
  if (fill_.run == nullptr || fill_.run->digests().empty()) return {};
  const std::span<const uint32_t> in_runs = exchange_.in_runs();
  for (size_t i = 0; i < in_runs.size(); ++i)
    if (!routes()[in_runs[i]].quantised) digests()[in_runs[i]] = fill_.run->digests()[i];
  return digests().first(routes().size());
}

void SourceLink::offer(int64_t version, uint32_t slot) {
  if (taking_ == 0) progress_ = 0;
  forget_end_of(version);
  fill_.versions[slot] = version;
  link_->send(Offer{.version = version, .slot = slot});
}

void SourceLink::keep(int64_t version, uint32_t epoch) {
  link_->send(Held{.version = version, .epoch = epoch});
}

void SourceLink::withdraw(int64_t version) {
  link_->send(Withdraw{.version = version});
}

// A send that failed may be repeated, and a staged version that not all could take is taken once more, also by those
// that had it already.
void SourceLink::forget_end_of(int64_t version) {
  if (done_version_ == version) done_version_ = 0;
  if (ended_version_ == version) ended_version_ = 0;
}

void SourceLink::grant(int64_t version, uint32_t epoch, Stamp stamp, std::span<const int64_t> deltas) {
  forget_end_of(version);
  taking_ = version;
  progress_ = 0;
  deltas_ = {};
  for (size_t i = 0; i < deltas.size(); ++i)
    if (deltas[i] != Grant::kInFull && !exchange_.skips(i))
      deltas_ += {1, deltas[i], SourceEnd::bytes_of_route(routes()[i])};
  grant_.version = version;
  grant_.epoch = epoch;
  grant_.stamp = stamp;
  grant_.deltas.assign(deltas.begin(), deltas.end());
  link_->send(grant_);
  digests_.sent = false;
  fill_.second = false;
  const auto slot = std::ranges::find(fill_.versions, version);
  fill_.slot = slot == fill_.versions.end() ? 0 : static_cast<uint32_t>(slot - fill_.versions.begin());
  if (!streams()) return;
  fill_.run = &exchange_.run(fill_.slot);
  travel(deltas);
  start_fill(epoch);
}

void SourceLink::refuse(int64_t version, uint32_t epoch, const Status& reason) {
  link_->send(Refuse{.version = version, .epoch = epoch, .reason = reason});
}

void SourceLink::revoke(const Status& reason) {
  if (taking_ != 0) link_->send(Revoke{.version = taking_, .epoch = epoch_, .reason = reason});
}

// Of one connection's routes, those in the runs.
void SourceLink::travel(std::span<const int64_t> deltas) {
  if (std::ranges::none_of(routes(), [](const ServedRoute& served) { return served.delta != nullptr; })) return;
  fill_.travel.clear();
  if (!deltas.empty())
    for (const uint32_t route : exchange_.in_runs()) fill_.travel.push_back(deltas[route]);
  exchange_.travel(fill_.slot, fill_.travel);
}

void SourceLink::send_digests(int64_t version) {
  if (std::exchange(digests_.sent, true)) return;
  digests_.message.version = version;
  digests_.message.digests.clear();
  digests_.sampled.draw(seed_of_version(sample_, version));
  for (size_t i = 0; i < digests_.all.size(); ++i)
    if (i >= digests_.sampled.size() || digests_.sampled.holds(i)) digests_.message.digests.push_back(digests_.all[i]);
  link_->send(digests_.message);
}

void SourceLink::abort_run(const Status& status) {
  if (fill_.running) fill_.run->abort(status);
}

void SourceLink::detach(const Status& why) {
  link_->send(Detach{.status = why});
  link_->close();
}

}  // namespace tessera::bus
