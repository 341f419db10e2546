// What the schedule is made of: uses of weights, and what each costs. Values; thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "etp/schedule/chains.h"
#include "tessera/etp.h"
#include "tessera/quantize.h"

namespace tessera::etp {

// The micro-batch position of a pass without gradients.
inline constexpr uint32_t kEvaluation = 0xFFFF'FFFF;

// One use of one plane of a weight.
struct Consumption {
  uint32_t weight = 0;        // an index into the list of weights; a list of experts that is gathered at once is one
  Plane plane = Plane::kRow;  // the one that is gathered: WeightFormat::gathered()
  Phase phase = Phase::kForward;
  uint32_t micro_batch = 0;  // its position since the last update, or kEvaluation

  bool same_gather(const Consumption& other) const { return weight == other.weight && plane == other.plane; }
  friend bool operator==(const Consumption&, const Consumption&) = default;
};

// One buffer of a gather: buffers with equal keys are of one pool (BufferCache). `key` is an index of the caller's.
struct GatherBuffer {
  uint32_t key = 0;
  int64_t bytes = 0;

  friend bool operator==(const GatherBuffer&, const GatherBuffer&) = default;
};

// What a use of a weight costs.
struct GatherCost {
  Chain chain = Chain::kUngraphed;
  bool experts = false;                // a list of experts: expert_distance counts for it
  std::vector<GatherBuffer> row{};     // several for a list of experts
  std::vector<GatherBuffer> column{};  // empty where the row plane serves both

  const std::vector<GatherBuffer>& buffers(Plane plane) const {
    return plane == Plane::kColumn && !column.empty() ? column : row;
  }
  int64_t bytes(Plane plane) const;
};

struct PrefetchOptions {
  bool weight_prefetch = true;  // false: everything is gathered on demand
  int distance = 1;             // uses ahead
  int expert_distance = 2;      // of lists of experts
  // Gathered memory: what is in use and what is prefetched. A prefetch that would go above it is not issued, and none
  // behind it: memory goes to the nearest use first. What is gathered on demand is gathered in any case.
  std::optional<int64_t> cap_bytes = std::nullopt;

  int reach(bool experts) const { return !weight_prefetch ? 0 : experts ? expert_distance : distance; }
  int farthest() const { return weight_prefetch ? std::max(distance, expert_distance) : 0; }
  bool fits(int64_t live_bytes, int64_t more) const { return !cap_bytes || live_bytes + more <= *cap_bytes; }
};

inline constexpr int kMaxDistance = 64;

// Throws Error(kInvalidArgument) for a distance outside 0 to kMaxDistance or a cap below 0.
void check_options(const PrefetchOptions& options);

// The uses of a step as a model's shape suggests them before the first one has run: per micro-batch, all weights in
// their order, then all that expect a backward gather in reverse order, with the column plane where there is one.
struct ExpectedUses {
  std::span<const std::string> names;
  std::span<const GatherCost> costs;
  int micro_batches = 1;
  bool backward = true;
  bool recompute = false;  // forward's gather again, before each backward use
};
std::vector<Consumption> expected_step(const ExpectedUses& uses);

}  // namespace tessera::etp
