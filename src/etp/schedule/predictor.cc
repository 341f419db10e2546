#include "etp/schedule/predictor.h"

#include <algorithm>
#include <utility>

#include "base/fail.h"

namespace tessera::etp {

size_t Predictor::UseHash::operator()(const Consumption& use) const {
  uint64_t bits = (uint64_t{use.weight} << 32 | use.micro_batch) ^
                  (static_cast<uint64_t>(use.phase) << 1 | static_cast<uint64_t>(use.plane)) * 0x9E3779B97F4A7C15;
  bits = (bits ^ bits >> 31) * 0xBF58476D1CE4E5B9;
  return static_cast<size_t>(bits ^ bits >> 29);
}

Predictor::Predictor(PrefetchOptions options, std::vector<GatherCost> costs) : options_(options) {
  check_options(options_);
  for (size_t chain = 0; chain < kChains; ++chain) {
    places_.emplace_back();
    chains_.at(chain).cursor = start_of(chain);
    chains_.at(chain).issued.reserve(kMaxDistance);
  }
  ahead_.reserve(kMaxDistance);
  dropped_.reserve(size_t{kChains} * kMaxDistance);
  to_issue_.reserve(size_t{kChains} * kMaxDistance);
  for (GatherCost& cost : costs) add(std::move(cost));
}

uint32_t Predictor::add(GatherCost cost) {
  bytes_.push_back({cost.bytes(Plane::kRow), cost.bytes(Plane::kColumn)});
  costs_.push_back(std::move(cost));
  return static_cast<uint32_t>(costs_.size() - 1);
}

void Predictor::set_options(const PrefetchOptions& options) {
  check_options(options);
  options_ = options;
}

int64_t Predictor::bytes_of_use(const Consumption& use) const {
  return bytes_[use.weight].at(static_cast<size_t>(use.plane));
}

UseDecision Predictor::observe(const Consumption& use) {
  if (use.weight >= costs_.size())
    fail(ErrorCode::kInvalidArgument, "a use of weight {}: there are {} weights"_message, use.weight, costs_.size());
  dropped_.clear();
  to_issue_.clear();
  ++counters_.uses;
  record(use);
  live_bytes_ -= std::exchange(current_bytes_, 0);

  ChainState& chain = chains_.at(static_cast<size_t>(costs_[use.weight].chain));
  const PlaceIndex predicted = places_[chain.cursor].next;
  if (is_place(predicted) && options_.farthest() > 0 && !places_[predicted].use.same_gather(use))
    ++counters_.mispredicted;
  const PlaceIndex place = place_of(use, predicted);
  if (place != kUnknown) move_to(chain, place);

  const std::optional<uint64_t> taken = take(chain, place, use);
  look_ahead(chain);
  drop_what_is_not_ahead(chain);
  current_bytes_ = bytes_of_use(use);
  if (!taken) {
    ++counters_.on_demand;
    make_room(current_bytes_);
    live_bytes_ += current_bytes_;
  }
  issue(chain);
  peak_bytes_ = std::max(peak_bytes_, live_bytes_);
  return {taken, dropped_, to_issue_};
}

std::span<const uint64_t> Predictor::interrupt() {
  dropped_.clear();
  for (ChainState& chain : chains_)
    while (!chain.issued.empty()) drop(chain, chain.issued.size() - 1);
  return dropped_;
}

std::span<const uint64_t> Predictor::update() {
  interrupt();
  for (size_t i = 0; i < chains_.size(); ++i) {
    ChainState& chain = chains_.at(i);
    if (chain.cursor != start_of(i)) places_[chain.cursor].next = kEnd;
    chain.cursor = start_of(i);
  }
  live_bytes_ -= std::exchange(current_bytes_, 0);
  ++pass_;
  if (!this_step_.empty()) std::swap(last_step_, this_step_);
  this_step_.clear();
  return dropped_;
}

std::span<const Prefetch> Predictor::start() {
  to_issue_.clear();
  for (size_t i = 0; i < chains_.size(); ++i) {
    ChainState& chain = chains_.at(i);
    if (chain.cursor != start_of(i)) continue;
    look_ahead(chain);
    issue(chain);
  }
  peak_bytes_ = std::max(peak_bytes_, live_bytes_);
  return to_issue_;
}

void Predictor::replayed(Chain chain) {
  const auto index = static_cast<size_t>(chain);
  if (chains_.at(index).cursor == start_of(index)) places_[start_of(index)].next = kEnd;
}

void Predictor::new_pass() {
  passes_are_told_ = true;
  ++pass_;
}

Predictor::Siblings Predictor::siblings_of(const Consumption& use) const {
  Siblings found;
  const auto first = first_places_.find(use);
  for (PlaceIndex at = first == first_places_.end() ? kUnknown : first->second; is_place(at);
       at = places_[at].sibling) {
    if (places_[at].pass != pass_) return {.unreached = at};
    found.last = at;
  }
  return found;
}

Predictor::PlaceIndex Predictor::last_of(const Consumption& use) const {
  const auto first = first_places_.find(use);
  if (first == first_places_.end()) return kUnknown;
  PlaceIndex last = first->second;
  while (is_place(places_[last].sibling)) last = places_[last].sibling;
  return last;
}

// The predicted place if it fits, else the first of this use that the pass has not reached, else a new one.
Predictor::PlaceIndex Predictor::place_of(const Consumption& use, PlaceIndex predicted) {
  const bool evaluates = use.micro_batch == kEvaluation;
  if (is_place(predicted) && places_[predicted].use == use && (evaluates || places_[predicted].pass != pass_))
    return predicted;
  const Siblings siblings = siblings_of(use);
  if (is_place(siblings.unreached)) return siblings.unreached;
  if (is_place(siblings.last) && evaluates && !passes_are_told_) {
    ++pass_;
    return first_places_.at(use);
  }
  if (places_.size() >= kMaxPlaces) return siblings.last;
  return make_place(use, siblings.last, before_of(use, siblings.last));
}

// Where the next place of a use, whose places end with `last`, has been one micro-batch earlier.
Predictor::PlaceIndex Predictor::before_of(const Consumption& use, PlaceIndex last) const {
  PlaceIndex before = kUnknown;
  if (is_place(last)) {
    if (is_place(places_[last].before)) before = places_[places_[last].before].sibling;
  } else if (use.micro_batch > 0 && use.micro_batch != kEvaluation) {
    Consumption earlier = use;
    --earlier.micro_batch;
    const auto first = first_places_.find(earlier);
    if (first != first_places_.end()) before = first->second;
  }
  while (is_place(before) && is_place(places_[before].after)) before = places_[before].sibling;
  return before;
}

Predictor::PlaceIndex Predictor::make_place(const Consumption& use, PlaceIndex last, PlaceIndex before) {
  const auto made = static_cast<PlaceIndex>(places_.size());
  places_.push_back({.use = use, .before = before});
  if (is_place(last))
    places_[last].sibling = made;
  else
    first_places_.emplace(use, made);
  if (is_place(before)) places_[before].after = made;
  return made;
}

// Predicts what follows a place from which nothing has followed yet, as it went one micro-batch earlier.
void Predictor::expect_as_before(PlaceIndex place) {
  const PlaceIndex before = places_[place].before;
  if (!is_place(before) || !is_place(places_[before].next)) return;
  const PlaceIndex followed = places_[before].next;
  Consumption use = places_[followed].use;
  if (use.micro_batch == kEvaluation) {  // which has no micro-batches
    places_[place].next = followed;
    return;
  }
  ++use.micro_batch;
  const bool has_room = places_.size() < kMaxPlaces;
  PlaceIndex expected = places_[followed].after;
  if (!is_place(expected)) {
    if (has_room) expected = make_place(use, last_of(use), followed);
  } else if (places_[expected].pass == pass_) {
    const Siblings siblings = siblings_of(use);
    expected = siblings.unreached;
    if (!is_place(expected) && has_room) expected = make_place(use, siblings.last, before_of(use, siblings.last));
  }
  places_[place].next = expected;
}

void Predictor::move_to(ChainState& chain, PlaceIndex place) {
  places_[chain.cursor].next = place;
  places_[place].prev = chain.cursor;
  places_[place].pass = pass_;
  chain.cursor = place;
}

// The predicted uses within reach, where they are known.
void Predictor::look_ahead(const ChainState& chain) {
  ahead_.clear();
  PlaceIndex at = chain.cursor;
  for (int step = 1; step <= options_.farthest(); ++step) {
    if (places_[at].next == kUnknown) expect_as_before(at);
    at = places_[at].next;
    if (!is_place(at)) return;
    if (step <= options_.reach(costs_[places_[at].use.weight].experts)) ahead_.push_back(at);
  }
}

// The prefetch of this very place, or else one of the same plane.
std::optional<uint64_t> Predictor::take(ChainState& chain, PlaceIndex place, const Consumption& use) {
  auto found = std::ranges::find(chain.issued, place, &Issued::place);
  if (found == chain.issued.end())
    found = std::ranges::find_if(chain.issued, [&](const Issued& i) { return places_[i.place].use.same_gather(use); });
  if (found == chain.issued.end()) return std::nullopt;
  const uint64_t id = found->id;
  chain.issued.erase(found);
  return id;
}

// A prefetch for a place that is no longer ahead may serve another one that is.
void Predictor::drop_what_is_not_ahead(ChainState& chain) {
  if (places_[chain.cursor].next == kUnknown) return;
  const auto is_issued = [&](PlaceIndex place) {
    return std::ranges::find(chain.issued, place, &Issued::place) != chain.issued.end();
  };
  for (size_t i = 0; i < chain.issued.size();) {
    Issued& issued = chain.issued[i];
    if (std::ranges::find(ahead_, issued.place) == ahead_.end()) {
      const auto other = std::ranges::find_if(ahead_, [&](PlaceIndex place) {
        return !is_issued(place) && places_[place].use.same_gather(places_[issued.place].use);
      });
      if (other == ahead_.end()) {
        drop(chain, i);
        continue;
      }
      issued.place = *other;
    }
    ++i;
  }
}

void Predictor::make_room(int64_t bytes) {
  while (!options_.fits(live_bytes_, bytes)) {
    ChainState* latest = nullptr;
    for (ChainState& chain : chains_)
      if (!chain.issued.empty() && (latest == nullptr || latest->issued.back().id < chain.issued.back().id))
        latest = &chain;
    if (latest == nullptr) return;
    drop(*latest, latest->issued.size() - 1);
  }
}

void Predictor::drop(ChainState& chain, size_t position) {
  const Issued issued = chain.issued[position];
  live_bytes_ -= bytes_of_use(places_[issued.place].use);
  dropped_.push_back(issued.id);
  ++counters_.wasted;
  chain.issued.erase(chain.issued.begin() + static_cast<std::ptrdiff_t>(position));
}

void Predictor::issue(ChainState& chain) {
  for (const PlaceIndex place : ahead_) {
    if (std::ranges::find(chain.issued, place, &Issued::place) != chain.issued.end()) continue;
    const Consumption& use = places_[place].use;
    if (!options_.fits(live_bytes_, bytes_of_use(use))) {
      ++counters_.refused;
      return;
    }
    live_bytes_ += bytes_of_use(use);
    ++counters_.issued;
    chain.issued.push_back({next_id_, place});
    to_issue_.push_back({next_id_, use});
    ++next_id_;
  }
}

void Predictor::record(const Consumption& use) {
  if (this_step_.size() < kMaxRecorded) this_step_.push_back(use);
}

std::optional<Consumption> Predictor::next(const Consumption& use) const {
  const auto found = first_places_.find(use);
  if (found == first_places_.end() || !is_place(places_[found->second].next)) return std::nullopt;
  return places_[places_[found->second].next].use;
}

std::optional<Consumption> Predictor::prev(const Consumption& use) const {
  const auto found = first_places_.find(use);
  if (found == first_places_.end()) return std::nullopt;
  const PlaceIndex before = places_[found->second].prev;
  if (!is_place(before) || before < kChains) return std::nullopt;
  return places_[before].use;
}

}  // namespace tessera::etp
