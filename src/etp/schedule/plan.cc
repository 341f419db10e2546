#include "etp/schedule/plan.h"

#include <algorithm>
#include <array>
#include <map>

#include "base/fail.h"

namespace tessera::etp {
namespace {

// Buffers that are live, with their peaks.
class LiveBuffers {
 public:
  explicit LiveBuffers(std::span<const GatherCost> costs) : costs_(costs) {}

  int64_t bytes() const { return bytes_; }
  void take(const Consumption& use) { change(use, 1); }
  void drop(const Consumption& use) { change(use, -1); }
  std::vector<KeyPeak> peaks() const {
    std::vector<KeyPeak> all;
    for (const auto& [key, pool] : pools_) all.push_back({key, pool.most, pool.most * pool.bytes});
    return all;
  }

 private:
  struct Pool {
    int64_t bytes = 0;
    int64_t live = 0;
    int64_t most = 0;
  };

  void change(const Consumption& use, int64_t by) {
    for (const GatherBuffer& buffer : costs_[use.weight].buffers(use.plane)) {
      Pool& pool = pools_[buffer.key];
      TESSERA_CHECK(pool.bytes == 0 || pool.bytes == buffer.bytes);
      pool.bytes = buffer.bytes;
      pool.live += by;
      pool.most = std::max(pool.most, pool.live);
      bytes_ += by * buffer.bytes;
    }
  }

  std::span<const GatherCost> costs_;
  std::map<uint32_t, Pool> pools_;
  int64_t bytes_ = 0;
};

class Planner {
 public:
  Planner(std::span<const Consumption> observed, std::span<const GatherCost> costs, const PrefetchOptions& options)
      : costs_(costs), options_(options), live_(costs), prefetched_(observed.size()) {
    link(observed);
  }

  PrefetchPlan run() {
    for (const auto& first : firsts_)
      if (first) prefetch(first, plan_.at_start);
    plan_.peak_bytes = live_.bytes();
    for (uint32_t i = 0; i < plan_.uses.size(); ++i) {
      PlannedUse& planned = plan_.uses[i];
      planned.on_demand = !prefetched_[i];
      if (planned.on_demand)
        gather_on_demand(planned.use);
      else
        std::erase(pending_, i);
      prefetch(planned.next, planned.prefetches);
      planned.live_bytes = live_.bytes();
      plan_.peak_bytes = std::max(plan_.peak_bytes, planned.live_bytes);
      live_.drop(planned.use);
    }
    plan_.peaks = live_.peaks();
    plan_.cap_bytes = options_.cap_bytes;
    return std::move(plan_);
  }

 private:
  void link(std::span<const Consumption> observed) {
    std::array<std::optional<uint32_t>, kChains> last;
    for (uint32_t i = 0; i < observed.size(); ++i) {
      if (observed[i].weight >= costs_.size())
        fail(ErrorCode::kInvalidArgument, "use {} is of weight {}: there are {} weights"_message, i, observed[i].weight,
             costs_.size());
      const auto chain = static_cast<size_t>(costs_[observed[i].weight].chain);
      plan_.uses.push_back({.use = observed[i], .prev = last.at(chain)});
      if (last.at(chain))
        plan_.uses[*last.at(chain)].next = i;
      else
        firsts_.at(chain) = i;
      last.at(chain) = i;
    }
  }

  void gather_on_demand(const Consumption& use) {
    ++plan_.on_demand;
    for (; !pending_.empty() && !options_.fits(live_.bytes(), costs_[use.weight].bytes(use.plane));
         pending_.pop_back()) {
      live_.drop(plan_.uses[pending_.back()].use);
      prefetched_[pending_.back()] = false;
      ++plan_.wasted;
    }
    live_.take(use);
  }

  // Issues what is in reach, from the use `first` on.
  void prefetch(std::optional<uint32_t> first, std::vector<uint32_t>& issued) {
    for (int step = 1; first && step <= options_.farthest(); ++step, first = plan_.uses[*first].next) {
      const Consumption& use = plan_.uses[*first].use;
      const GatherCost& cost = costs_[use.weight];
      if (prefetched_[*first] || step > options_.reach(cost.experts)) continue;
      if (!options_.fits(live_.bytes(), cost.bytes(use.plane))) return;
      live_.take(use);
      prefetched_[*first] = true;
      pending_.push_back(*first);
      issued.push_back(*first);
    }
  }

  std::span<const GatherCost> costs_;
  PrefetchOptions options_;
  LiveBuffers live_;
  std::vector<bool> prefetched_;
  std::vector<uint32_t> pending_;  // in the order of issue
  std::array<std::optional<uint32_t>, kChains> firsts_{};
  PrefetchPlan plan_;
};

}  // namespace

int64_t PrefetchPlan::pool_bytes() const {
  int64_t sum = 0;
  for (const KeyPeak& peak : peaks) sum += peak.bytes;
  return cap_bytes ? std::min(sum, std::max(*cap_bytes, peak_bytes)) : sum;
}

PrefetchPlan plan_prefetch(std::span<const Consumption> observed, std::span<const GatherCost> costs,
                           const PrefetchOptions& options) {
  check_options(options);
  return Planner(observed, costs, options).run();
}

std::string link_table(const PrefetchPlan& plan, Chain chain, std::span<const std::string> names,
                       std::span<const GatherCost> costs) {
  const auto name = [&](std::optional<uint32_t> i) { return i ? names[plan.uses[*i].use.weight] : std::string("-"); };
  std::string lines;
  size_t count = 0;
  for (const PlannedUse& planned : plan.uses) {
    if (costs[planned.use.weight].chain != chain) continue;
    ++count;
    lines += fmt::format("\n  {} ({} {}): prev {}, next {}", names[planned.use.weight], to_string(planned.use.phase),
                         to_string(planned.use.plane), name(planned.prev), name(planned.next));
  }
  return fmt::format("ETP chain {}: {} uses{}", to_string(chain), count, lines);
}

}  // namespace tessera::etp
