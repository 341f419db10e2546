#include "peer/exchange/source_end.h"

#include <algorithm>
#include <utility>

#include "base/fail.h"

namespace tessera {
namespace {

ByteExtent extent_of_source(const SourceRoute& route) {
  return extent_of(route.what.dtype, route.src.owned.extents(), route.src.strides);
}

void send_attached(Link& link, Attached message) {
  std::vector<UniqueFd> fds = detach_fds(message.keys);
  if (message.more_keys)
    link.send(message, std::move(fds));
  else
    link.ask<Prepare>(message, std::move(fds));
}

}  // namespace

int64_t SourceEnd::bytes_of_route(const ServedRoute& served) {
  return bytes_of(served.route.what.dtype, served.route.what.region.size());
}

SourceEnd::SourceEnd(RunFactory& factory, const Endpoint& peer, std::vector<ServedRoute> routes, uint32_t slots,
                     bool digest, RunDone done)
    : factory_(factory),
      peer_(peer),
      exporter_(factory.make_exporter(peer)),
      routes_(std::move(routes)),
      slots_(slots),
      digest_(digest),
      done_(std::move(done)) {
  for (const ServedRoute& served : routes_) bytes_ += bytes_of_route(served);
}

Exporter::Exported SourceEnd::exported(const ServedRoute& served) const {
  const ByteExtent extent = extent_of_source(served.route);
  return exporter_->add(
      factory_.describe(served.route.data + extent.begin, static_cast<size_t>(extent.end - extent.begin)));
}

Exporter::Exported SourceEnd::exported_delta(const ServedRoute& served) const {
  return exporter_->add({.data = served.delta, .bytes = served.delta_bytes});
}

// The memory of one tensor (or reduced region), where its first element lies in it, and its strides.
Attached::Place SourceEnd::place_of(const ServedRoute& served) const {
  Attached::Place place{.memory = exported(served).range,
                        .origin = static_cast<uint64_t>(-extent_of_source(served.route).begin),
                        .strides = served.route.src.strides,
                        .slot_bytes = served.slot_bytes,
                        .delta_slot_bytes = served.delta_slot_bytes};
  if (served.delta != nullptr) place.delta = exported_delta(served).range;
  return place;
}

// A message carries a bounded number of descriptors, so many keys take several messages. The last one has the places.
void SourceEnd::attach(Link& link) {
  Attached last{.slots = slots_};
  for (size_t i = 0; i < routes_.size(); ++i) {
    const bool same = i > 0 && !routes_[i].per_route && !routes_[i - 1].per_route &&
                      routes_[i - 1].route.what.tensor == routes_[i].route.what.tensor;
    if (!same) last.places.push_back(place_of(routes_[i]));
  }
  std::vector<std::vector<RemoteKey>> parts = split_by_fds(exporter_->take_keys());
  last.keys = std::move(parts.back());
  parts.pop_back();
  for (std::vector<RemoteKey>& part : parts)
    send_attached(link, {.slots = slots_, .keys = std::move(part), .more_keys = true});
  send_attached(link, std::move(last));
}

bool SourceEnd::skips(size_t route) const {
  return std::ranges::binary_search(skipped_, static_cast<uint32_t>(route));
}

void SourceEnd::handle_prepare(Link& link, const Frame& frame) {
  auto prepare = parse<Prepare>(frame.payload);
  if (ready_) fail(ErrorCode::kMismatch, "Prepare came twice"_message);
  if (!prepare.skipped.empty() && prepare.skipped.back() >= routes_.size())
    fail(ErrorCode::kMismatch, "Prepare skips route {} of {}"_message, prepare.skipped.back(), routes_.size());
  for (const uint32_t skipped : prepare.skipped) bytes_ -= bytes_of_route(routes_[skipped]);
  skipped_ = std::move(prepare.skipped);
  StreamEnd end;
  if (prepare.stream) end = make_runs();
  ready_ = true;
  link.send(Prepared{.transport = std::move(end.transport)}, std::move(end.fds));
}

// The routes that a run packs or digests, as they lie in a slot.
std::vector<SourceRoute> SourceEnd::routes_in(uint32_t slot) const {
  std::vector<SourceRoute> routes;
  for (const uint32_t i : in_runs_) {
    const ServedRoute& served = routes_[i];
    SourceRoute& route = routes.emplace_back(served.route);
    route.data += slot * served.slot_bytes;
    route.streamed = !exported(served).caps.has(Access::kMap);
    route.digested = !served.quantised;
    if (served.delta != nullptr && !exported_delta(served).caps.has(Access::kMap))
      route.delta = served.delta + slot * served.delta_slot_bytes;
  }
  return routes;
}

// Makes one run for each slot. Returns the end of their stream that the other end uses.
StreamEnd SourceEnd::make_runs() {
  for (uint32_t i = 0; i < routes_.size(); ++i)
    if (!skips(i)) in_runs_.push_back(i);
  RunFactory::Source source = factory_.make_source(peer_, digest_, done_);
  for (uint32_t slot = 0; slot < slots_; ++slot)
    if (!source.runs->add_slot(routes_in(slot)))
      fail(ErrorCode::kMismatch, "Prepare asks for a stream, but nothing here is private"_message);
  runs_ = std::move(source.runs);
  return std::move(source.consumer);
}

}  // namespace tessera
