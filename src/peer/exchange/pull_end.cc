#include "peer/exchange/pull_end.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/escape.h"
#include "base/fail.h"

namespace tessera {

PullEnd::PullEnd(RunFactory& factory, Endpoint peer, std::vector<WantedRoute> routes, const Options& options,
                 RunDone done)
    : factory_(factory), peer_(std::move(peer)), routes_(std::move(routes)), options_(options), done_(std::move(done)) {
  for (uint32_t i = 0; i < routes_.size(); ++i)
    if (!routes_[i].skipped) pulled_.push_back(i);
}

void PullEnd::handle_attached(Link& link, Frame& frame) {
  if (runs_) fail(ErrorCode::kMismatch, "Attached out of turn"_message);
  auto attached = parse<Attached>(frame.payload);
  attach_fds(attached.keys, std::move(frame.fds));
  if (keys_.size() + attached.keys.size() > kMaxKeys)
    fail(ErrorCode::kMismatch, "Attached: {} keys and {} more, at most {}"_message, keys_.size(), attached.keys.size(),
         kMaxKeys);
  std::ranges::move(attached.keys, std::back_inserter(keys_));
  if (attached.more_keys) return;
  build(attached);
  Prepare prepare{.stream = streams(), .skipped = {}};
  for (uint32_t i = 0; i < routes_.size(); ++i)
    if (routes_[i].skipped) prepare.skipped.push_back(i);
  link.ask<Prepared>(prepare);
}

const Attached::Place& PullEnd::check_place(const Attached& attached, size_t place, size_t route) const {
  const RouteRegion& what = routes_[route].route.what;
  if (place >= attached.places.size())
    fail(ErrorCode::kMismatch, "places for {} tensors, more are needed"_message, attached.places.size());
  const Attached::Place& found = attached.places[place];
  if (found.strides.size() != what.shape.size())
    fail(ErrorCode::kMismatch, "a place of {} dims for a tensor of {}"_message, found.strides.size(),
         what.shape.size());
  if (has_delta(route) != found.delta.has_value())
    fail(ErrorCode::kMismatch, "tensor {}: a place {} a delta"_message, what.tensor, found.delta ? "with" : "without");
  return found;
}

// The routes that are pulled, as they lie in the source's first slot.
std::vector<PullRoute> PullEnd::place_routes(const Attached& attached, std::vector<SlotBytes>& slot_bytes) const {
  std::vector<PullRoute> routes;
  size_t places = 0;
  for (size_t i = 0; i < routes_.size(); ++i) {
    const WantedRoute& wanted = routes_[i];
    const bool same = i > 0 && !wanted.per_route && !routes_[i - 1].per_route &&
                      routes_[i - 1].route.what.tensor == wanted.route.what.tensor;
    if (!same) ++places;
    const Attached::Place& place = check_place(attached, places - 1, i);
    if (wanted.skipped) continue;
    PullRoute& route = routes.emplace_back(wanted.route);
    route.memory = place.memory;
    route.origin = place.origin;
    route.src.strides = place.strides;
    route.delta = place.delta;
    // With one slot, the pull reads the copy of what was sent last.
    if (route.delta && attached.slots == 1) route.src.owned = route.what.region;
    slot_bytes.push_back({place.slot_bytes, place.delta_slot_bytes});
  }
  if (places != attached.places.size())
    fail(ErrorCode::kMismatch, "places for {} tensors where {} are needed"_message, attached.places.size(), places);
  return routes;
}

void PullEnd::add_slots(PullRuns& runs, std::span<const PullRoute> first, std::span<const SlotBytes> slot_bytes) const {
  std::vector<PullRoute> routes(first.begin(), first.end());
  for (size_t slot = 0; slot < slots_; ++slot) {
    for (size_t i = 0; slot > 0 && i < routes.size(); ++i)
      if (__builtin_add_overflow(routes[i].memory.offset, slot_bytes[i].memory, &routes[i].memory.offset) ||
          (routes[i].delta &&
           __builtin_add_overflow(routes[i].delta->offset, slot_bytes[i].delta, &routes[i].delta->offset)))
        fail(ErrorCode::kMismatch, "slots of {} and {} bytes"_message, slot_bytes[i].memory, slot_bytes[i].delta);
    runs.add_slot(routes);
  }
}

void PullEnd::build(const Attached& attached) {
  std::unique_ptr<PullRuns> runs = factory_.make_pull(peer_, std::exchange(keys_, {}), options_.digest);
  slots_ = attached.slots;
  std::vector<SlotBytes> slot_bytes;
  std::vector<PullRoute> routes = place_routes(attached, slot_bytes);
  add_slots(*runs, routes, slot_bytes);
  const Incarnation self = Incarnation::self();
  const bool seen = peer_.process.same_host(self) && peer_.process.pid_namespace == self.pid_namespace;
  const auto registered = [&](uint32_t i) { return routes_[i].registered.has_value(); };
  direct_ =
      options_.runs && slots_ > 1 && seen && runs->program(0)->only_maps() && std::ranges::all_of(pulled_, registered);
  for (size_t i = 0; direct_ && i < routes.size(); ++i) {
    const WantedRoute::Registered& tensor = *routes_[pulled_[i]].registered;
    routes[i].dst = tensor.dst;
    routes[i].data = tensor.data;
  }
  if (direct_) add_slots(*runs, routes, slot_bytes);
  runs_ = std::move(runs);
}

void PullEnd::handle_prepared(Frame& frame) {
  auto prepared = parse<Prepared>(frame.payload);
  if (ready_ || !runs_) fail(ErrorCode::kMismatch, "Prepared out of turn"_message);
  if (frame.fds.empty() == streams() || prepared.transport.empty() == streams())
    fail(ErrorCode::kMismatch, "Prepared with {} descriptors of {}"_message, frame.fds.size(),
         in_quotes(prepared.transport));
  StreamEnd end{.transport = std::move(prepared.transport), .fds = std::move(frame.fds)};
  if (options_.runs)
    runs_->make_runs(std::move(end), done_);
  else if (streams())
    stream_ = runs_->open_stream(std::move(end));
  ready_ = true;
}

const std::shared_ptr<const PullProgram>& PullEnd::program() const {
  static const std::shared_ptr<const PullProgram> none;
  return runs_ ? runs_->program(0) : none;
}

}  // namespace tessera
