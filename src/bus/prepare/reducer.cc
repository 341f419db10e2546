#include "bus/prepare/reducer.h"

#include <algorithm>

#include "base/fail.h"
#include "base/rounding.h"
#include "codec/simd/reduce.h"
#include "transport/peer_memory.h"

namespace tessera::bus {
namespace {

constexpr size_t kAlignment = 64;

size_t aligned(int64_t bytes) {
  return round_up(static_cast<size_t>(bytes), kAlignment);
}

}  // namespace

Reducer::Reducer(Agent& agent, const SessionSetup& setup, Events events)
    : agent_(agent),
      setup_(setup),
      events_(std::move(events)),
      run_done_(agent.loop(),
                [this] {
                  round_.run_ended = true;
                  check_run();
                }),
      own_done_(agent.loop(),
                [this] {
                  own_running_ = false;
                  check_run();
                }),
      own_begins_(agent.loop(), [this] { begin_own(); }) {
  const std::vector<OwnedReduction>& reductions = setup_.routes.reductions;
  size_t result_bytes = 0;
  size_t accumulator_bytes = 0;
  for (const OwnedReduction& reduction : reductions) {
    const DType dtype = setup_.agreement.match.tensors[reduction.tensor].src_dtype;
    result_bytes += aligned(bytes_of(dtype, reduction.region.size()));
    accumulator_bytes += aligned(bytes_of(accumulator_of(dtype), reduction.region.size()));
  }
  slot_bytes_ = result_bytes;
  results_ = SharedHeap::process().allocate(setup_.slots * result_bytes, kAlignment);
  accumulators_.resize(accumulator_bytes + kAlignment);
  std::byte* result = results_.data();
  std::byte* accumulator = accumulators_.data();
  for (const OwnedReduction& reduction : reductions) {
    const DType dtype = setup_.agreement.match.tensors[reduction.tensor].src_dtype;
    targets_.push_back({.op = reduction.op,
                        .dtype = dtype,
                        .elements = reduction.region.size(),
                        .peers = static_cast<int>(reduction.peers.size()),
                        .accumulator = accumulator,
                        .result = result});
    result += aligned(bytes_of(dtype, reduction.region.size()));
    accumulator += aligned(bytes_of(accumulator_of(dtype), reduction.region.size()));
  }

  std::map<Rank, std::vector<WantedRoute>> wanted;  // by peer
  for (size_t i = 0; i < reductions.size(); ++i)
    for (const Rank peer : reductions[i].peers)
      if (peer != agent_.identity().rank) wanted[peer].push_back({.route = route_into(i, peer)});
  for (auto& [peer, routes] : wanted) {
    PullLinkOptions options{
        .digest = false, .tensor_name = [this](uint32_t tensor) { return setup_.tensors[tensor].name; }, .runs = false};
    links_.push_back(std::make_unique<PullLink>(agent_, *setup_.runs, *this, agent_.identity().job, peer,
                                                setup_.view.own[static_cast<size_t>(peer)], std::move(routes),
                                                std::move(options)));
  }
}

void Reducer::connect() {
  if (links_.empty() && !targets_.empty()) build_run();  // otherwise when the last link is ready
}

Reducer::~Reducer() = default;

// Reduction `index` as read from `peer`, still without the peer's address.
PullRoute Reducer::route_into(size_t index, Rank peer) const {
  const OwnedReduction& reduction = setup_.routes.reductions[index];
  const Match::Tensor& matched = setup_.agreement.match.tensors[reduction.tensor];
  PullRoute route;
  route.what = {
      .tensor = reduction.tensor, .shape = matched.shape, .dtype = matched.src_dtype, .region = reduction.region};
  route.src.owned = matched.src.owned(matched.shape, peer);
  route.dst_dtype = accumulator_of(matched.src_dtype);
  route.dst = {.owned = reduction.region, .strides = byte_strides(route.dst_dtype, reduction.region.extents())};
  route.data = targets_[index].accumulator;
  route.combine = peer == reduction.peers.front() ? Combine::kFirst : Combine::kAccumulate;
  route.op = reduction.op;
  return route;
}

bool Reducer::ready() const {
  return std::ranges::all_of(links_, [](const auto& link) { return link->ready(); });
}

void Reducer::on_pull_ready(PullLink&) {
  if (ready()) build_run();
  events_.ready_changed();
}

// One step for each peer, in ascending rank order; this rank's own terms are read in place.
void Reducer::build_run() {
  std::vector<PullRoute> own;
  for (size_t i = 0; i < targets_.size(); ++i) {
    const OwnedReduction& reduction = setup_.routes.reductions[i];
    PullRoute route = route_into(i, agent_.identity().rank);
    const LocalTensor& local = setup_.terms()[reduction.tensor];
    const ByteExtent extent = local.extent();
    route.src = local.array;
    route.memory = own_range(local.data + extent.begin, static_cast<size_t>(extent.end - extent.begin));
    route.origin = static_cast<uint64_t>(-extent.begin);
    own.push_back(std::move(route));
  }
  RunFactory::OwnTerms terms = setup_.runs->make_own_terms(own, [this] { own_done_.raise(); });
  own_terms_ = std::move(terms.source);
  if (own_terms_) terms.step.on_start = [this] { own_begins_.raise(); };

  std::vector<ReduceRun::Step> steps;
  bool own_is_in = false;
  const auto add_own = [&] {
    if (!std::exchange(own_is_in, true)) steps.push_back(std::move(terms.step));
  };
  for (const auto& link : links_) {
    if (link->rank() > agent_.identity().rank) add_own();
    std::function<void()> on_start;
    if (link->streams()) {
      const auto take = [this, peer = link.get()] {
        if (round_.running && !peer->busy()) peer->take(round_.version, round_.epoch);
      };
      take_signals_.push_back(std::make_unique<LoopSignal>(agent_.loop(), take));
      on_start = [signal = take_signals_.back().get()] { signal->raise(); };
    }
    steps.push_back({.program = link->program(), .stream = link->stream(), .on_start = std::move(on_start)});
  }
  add_own();
  run_ = setup_.runs->make_reduction(std::move(steps), targets_, [this] { run_done_.raise(); });
}

void Reducer::start(int64_t version, uint32_t slot) {
  round_.version = version;
  round_.slot = slot;
  ask();
  compare();
}

void Reducer::on_offer(PullLink&) {
  if (busy() && !round_.asked) ask();
  compare();
}

// Ranks that have been asked are at the same version; one that has ended it may have gone on.
void Reducer::compare() {
  if (round_.asked) return;
  int64_t newest = round_.version;
  for (const auto& link : links_) newest = std::max(newest, link->offered());
  for (const auto& link : links_) link->tell_ahead(newest, false);
  if (busy() && newest > round_.version) events_.ahead(newest);
}

// A peer whose stream is read is asked when its step begins, since the stream is filled from then on.
void Reducer::ask() {
  if (!waiting_for().empty()) return;
  round_.asked = true;
  ++round_.epoch;
  for (const auto& link : links_)
    if (!link->streams()) link->take(round_.version, round_.epoch);
  start_run();
}

void Reducer::on_granted(PullLink&) {
  if (round_.asked && !round_.running) start_run();
}

void Reducer::start_run() {
  const auto may_read = [](const auto& link) { return link->streams() || link->granted(); };
  if (!std::ranges::all_of(links_, may_read)) return;
  round_.running = true;
  round_.run_ended = false;
  run_->start(round_.epoch, round_.slot * slot_bytes_);
}

void Reducer::begin_own() {
  if (!round_.running || round_.run_ended || own_running_) return;
  own_running_ = true;
  own_terms_->start(round_.epoch);
}

// Over once nobody reads this rank's own terms any more, either.
void Reducer::check_run() {
  if (!round_.running) return;
  if (own_terms_ && !own_running_ && !own_terms_->status().ok()) run_->abort(own_terms_->status());
  if (!round_.run_ended) return;
  const Status status = run_->status();
  if (own_running_) {
    if (!status.ok()) own_terms_->abort(status);
    return;
  }
  finish(status);
}

void Reducer::on_pulled(PullLink&, const Status& status) {
  if (!status.ok()) abort(status);  // refused; after finish() nothing is under way
}

void Reducer::on_aborted(PullLink&, const Status& status) {
  abort(status);
}

std::vector<std::string> Reducer::waiting_for() const {
  std::vector<std::string> names;
  for (const auto& link : links_)
    if (busy() && !link->offers(round_.version)) names.push_back(link->name());
  return names;
}

void Reducer::finish(const Status& status) {
  round_.running = false;
  round_.asked = false;
  const int64_t version = std::exchange(round_.version, 0);
  for (const auto& link : links_) {
    if (link->busy())
      link->finish(status);
    else if (!status.ok())
      link->send_done(version, status);  // otherwise it would wait for this rank
  }
  compare();
  events_.reduced(status);
}

void Reducer::abort(const Status& status) {
  if (!busy()) return;
  if (round_.running)
    run_->abort(status);
  else
    finish(status);
}

void Reducer::on_pull_detached(PullLink&, const Status& reason) {
  events_.lost(reason);
}

void Reducer::on_pull_lost(PullLink&, const Status& status) {
  events_.lost(status);
}

void Reducer::on_pull_broken(PullLink&, const Status& status) {
  events_.lost(status);
}

void Reducer::detach(const Status& why) {
  for (const auto& link : links_) link->detach(why);
}

std::string Reducer::missing() const {
  return fmt::format("{} have not offered their terms of the Partial tensors"_message, fmt::join(waiting_for(), ", "));
}

std::string Reducer::awaited(int64_t version) const {
  return fmt::format("{} to offer terms of version {}"_message, fmt::join(waiting_for(), ", "), version);
}

}  // namespace tessera::bus
