#include "bus/session/source_link.h"

#include <algorithm>
#include <utility>

#include "base/fail.h"

namespace tessera::bus {
namespace {

int64_t bytes_of_route(const ServedRoute& served) {
  return bytes_of(served.route.what.dtype, served.route.what.region.size());
}

}  // namespace

SourceLink::SourceLink(Agent& agent, RunFactory& factory, SourceLinkOwner& owner, Caller caller,
                       std::vector<ServedRoute> routes, uint32_t slots, bool digest)
    : factory_(factory),
      owner_(owner),
      link_(std::move(caller.link)),
      rank_(caller.hello.rank),
      incarnation_(caller.hello.incarnation),
      name_(link_->name()),
      exporter_(factory.make_exporter({.process = incarnation_, .name = name_})),
      routes_(std::move(routes)),
      digest_(digest),
      slots_(slots),
      keeps_(slots > 1),
      run_done_(agent.loop(), [this] { handle_run_done(); }) {
  for (const ServedRoute& served : routes_) bytes_ += bytes_of_route(served);
  std::vector<SecondDigest> seconds;
  for (const ServedRoute& served : routes_)
    seconds.push_back(served.quantised      ? SecondDigest::kRest
                      : served.delta_digest ? SecondDigest::kPiece
                                            : SecondDigest::kNone);
  table_ = DigestTable(seconds);
  digests_.digests.resize(table_.size());
  in_slot_.resize(slots);
  link_->set_handlers([this](Frame& frame) { handle(frame); },
                      [this](const Status& status) { owner_.on_source_lost(*this, status); },
                      [this](const Detach& detach) {
                        left_ = detach.status.ok();
                        owner_.on_source_detached(*this, detach.reason(name_));
                      },
                      [this](const Status& status) { owner_.on_source_broken(*this, status); });
  link_->watch_process(incarnation_);
  send_places(slots);
}

SourceLink::~SourceLink() {
  if (link_) link_->close();
}

// What one tensor (or reduced region) takes around its first element, and how it is laid out there.
Attached::Place SourceLink::place_of(const ServedRoute& served) {
  const SourceRoute& route = served.route;
  const ByteExtent extent = extent_of(route.what.dtype, route.src.owned.extents(), route.src.strides);
  Attached::Place place{.memory = exported(route, extent).range,
                        .origin = static_cast<uint64_t>(-extent.begin),
                        .strides = route.src.strides,
                        .slot_bytes = served.slot_bytes,
                        .delta_slot_bytes = served.delta_slot_bytes};
  if (served.delta != nullptr) place.delta = exported_delta(served).range;
  return place;
}

Exporter::Exported SourceLink::exported(const SourceRoute& route, const ByteExtent& extent) {
  return exporter_->add(factory_.describe(route.data + extent.begin, static_cast<size_t>(extent.end - extent.begin)));
}

Exporter::Exported SourceLink::exported_delta(const ServedRoute& served) {
  return exporter_->add({.data = served.delta, .bytes = served.delta_bytes});
}

// A message carries a bounded number of descriptors: more keys take more messages, the last has the places.
void SourceLink::send_places(uint32_t slots) {
  Attached message{.slots = slots};
  for (size_t i = 0; i < routes_.size(); ++i) {
    if (!routes_[i].per_route && i > 0 && !routes_[i - 1].per_route &&
        routes_[i - 1].route.what.tensor == routes_[i].route.what.tensor)
      continue;
    message.places.push_back(place_of(routes_[i]));
  }
  std::vector<std::vector<RemoteKey>> parts = split_by_fds(exporter_->take_keys());
  for (size_t i = 0; i + 1 < parts.size(); ++i) send_keys({.slots = slots, .more_keys = true}, std::move(parts[i]));
  send_keys(std::move(message), std::move(parts.back()));
}

void SourceLink::send_keys(Attached message, std::vector<RemoteKey> keys) {
  message.keys = std::move(keys);
  std::vector<UniqueFd> fds = detach_fds(message.keys);
  link_->send(message, std::move(fds));
}

void SourceLink::handle(Frame& frame) {
  switch (frame.type) {
    case kCode<Prepare>:
      return prepare(parse<Prepare>(frame.payload));
    case kCode<Hold>: {
      const Hold hold = parse<Hold>(frame.payload);
      if (!ready_ || hold.epoch <= epoch_)
        fail(ErrorCode::kMismatch, "Hold of version {} in epoch {} out of turn", hold.version, hold.epoch);
      return owner_.on_hold(*this, hold.version, hold.epoch);
    }
    case kCode<Release>:
      (void)parse<Release>(frame.payload);
      return owner_.on_released(*this);
    case kCode<Take>: {
      const Take take = parse<Take>(frame.payload);
      if (streams() && taking_ != 0 && take.version == taking_ && take.epoch == epoch_ && deltas_.routes > 0 &&
          !again_) {
        again_ = true;
        return running_ ? void() : fill_again();
      }
      if (!ready_ || taking_ != 0 || waiting_take_ || take.epoch <= epoch_ ||
          (take.version == done_version_ && (running_ || !keeps_)))
        fail(ErrorCode::kMismatch, "Take of version {} in epoch {} out of turn", take.version, take.epoch);
      epoch_ = take.epoch;
      if (running_) {  // the puller has drained the stream; the thread that filled it has still to say so
        waiting_take_ = take;
        return;
      }
      return owner_.on_take(*this, take);
    }
    case kCode<ProgressReport>: {
      const ProgressReport report = parse<ProgressReport>(frame.payload);
      if (report.version != taking_ || report.bytes <= progress_.load()) return;
      progress_ = std::min(report.bytes, bytes_);
      return owner_.on_progress(*this);
    }
    case kCode<Done>: {
      const Done done = parse<Done>(frame.payload);
      if (taking_ == 0 && !done.status.ok()) {  // it gave up before it began
        waiting_take_.reset();
        ended_version_ = done.version;
        return owner_.on_done(*this, done);
      }
      if (done.version != taking_ || taking_ == 0)
        fail(ErrorCode::kMismatch, "Done with version {} where {} was being taken", done.version, taking_);
      taking_ = 0;
      ended_version_ = done.version;
      if (done.status.ok()) {
        done_version_ = done.version;
        progress_ = bytes_;
      }
      return owner_.on_done(*this, done);
    }
    default:
      fail(ErrorCode::kMismatch, "unexpected message {}", frame.type);
  }
}

// Those that a run packs or digests, as they lie in a slot.
std::vector<SourceRoute> SourceLink::routes_in(uint32_t slot) {
  std::vector<SourceRoute> routes;
  for (const uint32_t i : program_routes_) {
    const ServedRoute& served = routes_[i];
    const ByteExtent extent =
        extent_of(served.route.what.dtype, served.route.src.owned.extents(), served.route.src.strides);
    SourceRoute& route = routes.emplace_back(served.route);
    route.data += slot * served.slot_bytes;
    route.streamed = !exported(served.route, extent).caps.has(Access::kMap);
    route.digested = !served.quantised;
    if (served.delta != nullptr && !exported_delta(served).caps.has(Access::kMap))
      route.delta = served.delta + slot * served.delta_slot_bytes;
  }
  return routes;
}

// The runs that fill a stream, one a slot. Returns the end of it that is the puller's.
StreamEnd SourceLink::make_runs() {
  for (uint32_t i = 0; i < routes_.size(); ++i)
    if (!skips(i)) program_routes_.push_back(i);
  RunFactory::Source source = factory_.make_source({.process = incarnation_, .name = name_}, digest_ && slots_ == 1,
                                                   [this] { run_done_.raise(); });
  for (uint32_t slot = 0; slot < slots_; ++slot)
    if (!source.runs->add_slot(routes_in(slot)))
      fail(ErrorCode::kMismatch, "Prepare asks for a stream, but nothing here is private");
  runs_ = std::move(source.runs);
  return std::move(source.consumer);
}

void SourceLink::prepare(const Prepare& prepare) {
  if (ready_) fail(ErrorCode::kMismatch, "Prepare came twice");
  if (!prepare.skipped.empty() && prepare.skipped.back() >= routes_.size())
    fail(ErrorCode::kMismatch, "Prepare skips route {} of {}", prepare.skipped.back(), routes_.size());
  for (const uint32_t skipped : prepare.skipped) bytes_ -= bytes_of_route(routes_[skipped]);
  skipped_ = prepare.skipped;
  StreamEnd end;
  if (prepare.stream) end = make_runs();
  ready_ = true;
  link_->send(Prepared{}, std::move(end.fds));
  owner_.on_source_ready(*this);
}

// A receiver does not hold what it said that it does: its deltas are of no use.
void SourceLink::fill_again() {
  travel({});
  deltas_ = {};
  again_ = false;
  running_ = true;
  run_->start(epoch_ | Take::kSecondFill);
}

void SourceLink::handle_run_done() {
  running_ = false;
  if (again_ && taking_ != 0) return fill_again();
  owner_.on_source_run_done(*this);
  const std::optional<Take> take = std::exchange(waiting_take_, std::nullopt);
  if (take && link_->open()) owner_.on_take(*this, *take);
}

std::span<const Digest> SourceLink::run_digests() {
  if (run_ == nullptr || run_->digests().empty()) return {};
  for (size_t i = 0; i < program_routes_.size(); ++i)
    if (!routes_[program_routes_[i]].quantised) digests_.digests[program_routes_[i]] = run_->digests()[i];
  return std::span(digests_.digests).first(routes_.size());
}

void SourceLink::offer(int64_t version, uint32_t slot) {
  if (taking_ == 0) progress_ = 0;
  forget_end_of(version);
  in_slot_[slot] = version;
  link_->send(Offer{.version = version, .slot = slot});
}

void SourceLink::keep(int64_t version, uint32_t epoch) {
  link_->send(Held{.version = version, .epoch = epoch});
}

void SourceLink::withdraw(int64_t version) {
  link_->send(Withdraw{.version = version});
}

// A send that failed may be repeated, and a staged version that not all could take is taken once more: by those, too,
// that had it already.
void SourceLink::forget_end_of(int64_t version) {
  if (done_version_ == version) done_version_ = 0;
  if (ended_version_ == version) ended_version_ = 0;
}

bool SourceLink::skips(size_t route) const {
  return std::ranges::binary_search(skipped_, static_cast<uint32_t>(route));
}

void SourceLink::grant(int64_t version, uint32_t epoch, Stamp stamp, std::span<const int64_t> deltas) {
  forget_end_of(version);
  taking_ = version;
  progress_ = 0;
  deltas_ = {};
  for (size_t i = 0; i < deltas.size(); ++i)
    if (deltas[i] != Grant::kInFull && !skips(i)) deltas_ += {1, deltas[i], bytes_of_route(routes_[i])};
  grant_.version = version;
  grant_.epoch = epoch;
  grant_.stamp = stamp;
  grant_.deltas.assign(deltas.begin(), deltas.end());
  link_->send(grant_);
  told_ = false;
  again_ = false;
  if (!streams()) return;
  const auto slot = std::ranges::find(in_slot_, version);
  run_slot_ = slot == in_slot_.end() ? 0 : static_cast<uint32_t>(slot - in_slot_.begin());
  run_ = &runs_->run(run_slot_);
  travel(deltas);
  running_ = true;
  run_->start(epoch);
}

void SourceLink::refuse(int64_t version, uint32_t epoch, const Status& reason) {
  link_->send(Refuse{.version = version, .epoch = epoch, .reason = reason});
}

void SourceLink::revoke(const Status& reason) {
  if (taking_ != 0) link_->send(Revoke{.version = taking_, .epoch = epoch_, .reason = reason});
}

// Of one connection's routes, those that the runs have.
void SourceLink::travel(std::span<const int64_t> deltas) {
  if (std::ranges::none_of(routes_, [](const ServedRoute& served) { return served.delta != nullptr; })) return;
  travel_.clear();
  for (size_t i = 0; i < program_routes_.size() && !deltas.empty(); ++i) travel_.push_back(deltas[program_routes_[i]]);
  runs_->travel(run_slot_, travel_);
}

void SourceLink::send_digests(int64_t version) {
  if (std::exchange(told_, true)) return;
  digests_.version = version;
  link_->send(digests_);
}

void SourceLink::abort_run(const Status& status) {
  if (running_) run_->abort(status);
}

void SourceLink::detach(const Status& why) {
  link_->send(Detach{.status = why});
  link_->close();
}

}  // namespace tessera::bus
