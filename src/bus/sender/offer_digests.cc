#include "bus/sender/offer_digests.h"

#include <algorithm>
#include <utility>

#include "exec/pull/source.h"

namespace tessera::bus {

OfferDigests::OfferDigests(const SessionSetup& setup, const Preparation& preparation, Done done)
    : setup_(setup), preparation_(preparation), done_(std::move(done)), slots_(setup.slots) {}

void OfferDigests::build(const ReceiverLinks& receivers, const SourceOf& source_of) {
  if (!setup_.agreement.digest || slots_.front().run) return;
  std::vector<bool> wanted(setup_.routes.sent.size(), false);
  const bool always_compared = preparation_.deltas() != nullptr && setup_.slots == 1;
  for (const auto& [rank, link] : receivers)
    if (!link->digests_itself())
      for (const LinkRoute& route : routes_to(*link))
        wanted[route.route] = !preparation_.quantises(route.route) && !always_compared;
  place_in_run_.assign(wanted.size(), 0);
  for (uint32_t i = 0; i < wanted.size(); ++i) {
    if (!wanted[i]) continue;
    place_in_run_[i] = static_cast<uint32_t>(in_run_.size());
    in_run_.push_back(i);
  }
  for (uint32_t index = 0; index < slots_.size(); ++index) {
    std::vector<SourceRoute> routes;
    for (const uint32_t i : in_run_) routes.push_back(source_of(i, index));
    Slot& slot = slots_[index];
    slot.done = std::make_unique<LoopSignal>(setup_.agent->loop(), [this, index] { on_run_done(index); });
    const auto done = [signal = slot.done.get()] { signal->raise(); };
    slot.run = setup_.runs->make_digests(routes, done);
  }
}

bool OfferDigests::begin(uint32_t index, int64_t version, bool compared) {
  Slot& slot = slots_[index];
  slot.ready = false;
  slot.compared = compared;
  if (!slot.run) return false;
  if (in_run_.empty() || compared) {
    slot.ready = true;
    newest_slot_ = index;
    return true;
  }
  slot.running = true;
  slot.run->start(++runs_, seed_of_version(setup_.agreement.sample, version));
  return false;
}

void OfferDigests::on_run_done(uint32_t index) {
  Slot& slot = slots_[index];
  slot.running = false;
  slot.ready = slot.run->status().ok();
  if (slot.ready && setup_.slots > 1) newest_slot_ = index;
  done_(index);
}

void OfferDigests::abort(uint32_t slot, const Status& status) {
  if (slots_[slot].running) slots_[slot].run->abort(status);
}

bool OfferDigests::any_running() const {
  return std::ranges::any_of(slots_, &Slot::running);
}

// --- sending -------------------------------------------------------------------------------------

std::span<const LinkRoute> OfferDigests::routes_to(const SourceLink& link) const {
  return setup_.routes.by_peer[static_cast<size_t>(link.rank())];
}

void OfferDigests::send(SourceLink& link, uint32_t slot, int64_t version) const {
  if (link.digests_itself() || !setup_.agreement.digest) return;
  if (slots_[slot].compared)
    fill_compared(link, slot);
  else
    fill_plain(link, slot);
  fill_quantised(link, slot);
  link.send_digests(version);
}

void OfferDigests::send_streamed(SourceLink& link, const uint32_t* slot, int64_t version) const {
  if (!link.digests_itself() || link.run_digests().empty()) return;
  if (slot != nullptr) {
    if (slots_[*slot].compared) fill_compared(link, *slot);
    fill_quantised(link, *slot);
  }
  link.send_digests(version);
}

void OfferDigests::fill_plain(SourceLink& link, uint32_t slot) const {
  const std::span<const LinkRoute> routes = routes_to(link);
  const std::span<const Digest> digests = slots_[slot].run->digests();
  for (size_t i = 0; i < routes.size(); ++i) {
    if (preparation_.quantises(routes[i].route)) continue;
    link.digests()[i] = digests[place_in_run_[routes[i].route]];
  }
}

void OfferDigests::fill_compared(SourceLink& link, uint32_t slot) const {
  const std::span<const LinkRoute> routes = routes_to(link);
  const DeltaEncoder& deltas = *preparation_.deltas();
  for (size_t i = 0; i < routes.size(); ++i) {
    const uint32_t sent = routes[i].route;
    if (preparation_.quantises(sent)) continue;
    link.digests()[i] = deltas.digest(sent, slot);
    if (link.table().has_second(i)) link.digests()[link.table().second(i)] = deltas.piece_digest(sent, slot);
  }
}

void OfferDigests::fill_quantised(SourceLink& link, uint32_t slot) const {
  const std::span<const LinkRoute> routes = routes_to(link);
  for (size_t i = 0; i < routes.size(); ++i) {
    const uint32_t sent = routes[i].route;
    if (!preparation_.quantises(sent)) continue;
    link.digests()[i] = preparation_.quantizer()->digest(sent, slot);
    link.digests()[link.table().second(i)] = preparation_.quantizer()->rest(sent, slot);
  }
}

void OfferDigests::sum(const ReceiverLinks& receivers, std::vector<Digest>& sums) {
  const std::vector<SentRoute>& sent = setup_.routes.sent;
  const Slot& newest = slots_[newest_slot_];
  sums.assign(setup_.tensors.size(), {});
  counted_.assign(sent.size(), false);
  const auto add = [&](uint32_t route, const Digest& digest) {
    if (counted_[route]) return;
    counted_[route] = true;
    sums[sent[route].tensor] += digest;
  };
  const bool compared = newest.compared && setup_.agreement.digest;
  for (uint32_t i = 0; compared && i < sent.size(); ++i)
    if (!preparation_.quantises(i)) add(i, preparation_.deltas()->digest(i, newest_slot_));
  for (size_t i = 0; !compared && i < in_run_.size(); ++i) add(in_run_[i], newest.run->digests()[i]);
  for (uint32_t i = 0; i < sent.size() && setup_.agreement.digest; ++i)
    if (preparation_.quantises(i)) add(i, preparation_.quantizer()->digest(i, newest_slot_));
  for (const auto& [rank, link] : receivers) {
    const std::span<const Digest> digests = link->run_digests();
    for (size_t i = 0; i < digests.size(); ++i)
      if (digests[i].elements != 0) add(routes_to(*link)[i].route, digests[i]);
  }
}

}  // namespace tessera::bus
