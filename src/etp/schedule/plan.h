// The plan of prefetches for a step whose uses come in a known order. A pure function; thread-safe.
//
// At each use, after its buffer is taken and before its GEMM runs, the next uses of the same chain are gathered, up to
// `distance` uses ahead (`expert_distance` for lists of experts). No prefetch goes beyond the end of the step, where an
// update makes new versions; the first uses are prefetched at the start of the next one. What is gathered on demand may
// take the cap from prefetches, those issued last first.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "etp/schedule/consumption.h"

namespace tessera::etp {

// The most of one pool's buffers that are live at once.
struct KeyPeak {
  uint32_t key = 0;
  int64_t buffers = 0;
  int64_t bytes = 0;

  friend bool operator==(const KeyPeak&, const KeyPeak&) = default;
};

struct PlannedUse {
  Consumption use;
  std::optional<uint32_t> prev{};  // of its chain, as indices of uses
  std::optional<uint32_t> next{};
  bool on_demand = false;              // nobody prefetched it
  std::vector<uint32_t> prefetches{};  // the uses that are gathered meanwhile, the nearest first
  int64_t live_bytes = 0;              // then: its own buffers, and all that are prefetched
};

struct PrefetchPlan {
  std::vector<uint32_t> at_start;  // gathered before the first use
  std::vector<PlannedUse> uses;
  std::vector<KeyPeak> peaks;  // ascending by key; a pool keeps so much
  int64_t peak_bytes = 0;      // the largest live_bytes
  int64_t on_demand = 0;       // uses
  int64_t wasted = 0;          // prefetches that are dropped again, for a use that is gathered on demand
  std::optional<int64_t> cap_bytes = std::nullopt;

  // What the pools of gathered weights hold in all: each its own peak, which need not be at one time. Below a cap,
  // pools make room for each other.
  int64_t pool_bytes() const;
  const std::vector<KeyPeak>& forecast() const { return peaks; }
};

// `observed`: the uses of one step, in order; `costs`: of each weight. Throws Error(kInvalidArgument) for a use of a
// weight that `costs` lacks, and as check_options() does.
PrefetchPlan plan_prefetch(std::span<const Consumption> observed, std::span<const GatherCost> costs,
                           const PrefetchOptions& options);

// The links of one chain as a table, a line a use; `names` are the weights'.
std::string link_table(const PrefetchPlan& plan, Chain chain, std::span<const std::string> names,
                       std::span<const GatherCost> costs);

}  // namespace tessera::etp
