#include "plan/batch_balance.h"

#include <algorithm>

#include "base/fail.h"
#include "plan/shares.h"

namespace tessera::plan {

size_t Loads::slot(Rank rank) {
  const auto [at, is_new] = slots_.emplace(rank, bits_.size());
  if (is_new) bits_.push_back(0);
  return at->second;
}

Windows::Windows(const Kind& kind, const PlanOptions& options, Loads& loads)
    : members_(kind.pair().sources().members()) {
  const Holders& sources = kind.pair().sources();
  for (const Rank rank : sources.ranks()) slots_.push_back(loads.slot(rank));
  for (int cls = 0; cls < sources.classes(); ++cls) {
    const Index needed = kind.class_needed(cls);
    const Index shares = share_count(needed, members_, share_minimum(kind, options));
    Window window;
    if (shares < members_) {
      window = {static_cast<int>(shares), 0, kind.bits(needed / shares)};
    } else {
      window = {static_cast<int>(needed % members_), kind.bits(needed / members_), kind.bits(1)};
    }
    if (needed == 0) window = {};
    shifts_ = shifts_ || window.width > 0;
    classes_.push_back(window);
  }
}

int Windows::place(Loads& loads) const {
  const int rotation = shifts_ ? least_loaded(loads) : 0;
  size_t slot = 0;
  for (const Window& window : classes_) {
    for (int member = 0; member < members_; ++member, ++slot) {
      const bool inside = (member - rotation + members_) % members_ < window.width;
      loads[slots_[slot]] += window.base + (inside ? window.extra : 0);
    }
  }
  return rotation;
}

// The first rotation for which the windows of all classes together have the least load.
int Windows::least_loaded(Loads& loads) const {
  const auto members = static_cast<size_t>(members_);
  std::vector<int64_t> carried(members, 0);
  for (size_t cls = 0; cls < classes_.size(); ++cls) {
    const auto width = static_cast<size_t>(classes_[cls].width);
    if (width == 0) continue;
    const auto load = [&](size_t member) { return loads[slots_[cls * members + member % members]]; };
    int64_t sum = 0;
    for (size_t member = 0; member < width; ++member) sum += load(member);
    for (size_t rotation = 0; rotation < members; ++rotation) {
      carried[rotation] += sum;
      sum += load(rotation + width) - load(rotation);
    }
  }
  return static_cast<int>(std::ranges::min_element(carried) - carried.begin());
}

void EgressBound::add(const Kind& kind, int64_t count) {
  const Holders& sources = kind.pair().sources();
  const auto same = [&](const Classes& classes) {
    return classes.sources->members() == sources.members() &&
           std::ranges::equal(classes.sources->ranks(), sources.ranks());
  };
  auto at = std::ranges::find_if(structures_, same);
  if (at == structures_.end())
    at = structures_.insert(at, {&sources, std::vector<int64_t>(static_cast<size_t>(sources.classes()), 0)});
  for (int cls = 0; cls < sources.classes(); ++cls)
    at->needed[static_cast<size_t>(cls)] += kind.bytes(kind.class_needed(cls)) * count;
}

int64_t EgressBound::value() const {
  int64_t bound = 0;
  for (const Classes& outer : structures_) {
    std::vector<int64_t> within(outer.needed.size(), 0);
    for (const Classes& inner : structures_) {
      for (size_t cls = 0; cls < inner.needed.size(); ++cls) {
        const auto ranks = inner.sources->ranks(static_cast<int>(cls));
        const auto around = outer.sources->place_of(ranks.front());
        const auto is_around = [&](Rank rank) {
          const auto place = outer.sources->place_of(rank);
          return place && place->cls == around->cls;
        };
        if (around && std::ranges::all_of(ranks, is_around))
          within[static_cast<size_t>(around->cls)] += inner.needed[cls];
      }
    }
    const int members = outer.sources->members();
    for (const int64_t bytes : within) bound = std::max(bound, (bytes + members - 1) / members);
  }
  return bound;
}

}  // namespace tessera::plan
