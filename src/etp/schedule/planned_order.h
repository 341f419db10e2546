// The order in which a rank will move weights in its next step, as far as it is planned, and where two ranks differ:
// for back ends whose gathers and folds all ranks must call in one order. Pure functions; thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "etp/schedule/plan.h"

namespace tessera::etp {

// A line for each gather, in the order in which they are issued, and then for each fold: "gather row of layers.3",
// "fold layers.3". `names`: of the plan's weights; `folds`: names.
std::string planned_order(const PrefetchPlan& plan, std::span<const std::string> names,
                          std::span<const std::string> folds);

// The same on all ranks for equal orders.
uint64_t digest_of(std::string_view order);

// The first line that differs, counted from 1; a text is empty where its order has ended.
struct OrderDifference {
  size_t line = 0;
  std::string_view first;
  std::string_view second;
};
std::optional<OrderDifference> first_difference(std::string_view first, std::string_view second);

}  // namespace tessera::etp
