#define XXH_INLINE_ALL
#include "etp/schedule/planned_order.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <iterator>

namespace tessera::etp {
namespace {

// The first line, which is taken off.
std::string_view take_line(std::string_view& text) {
  const std::string_view line = text.substr(0, text.find('\n'));
  text.remove_prefix(std::min(line.size() + 1, text.size()));
  return line;
}

}  // namespace

std::string planned_order(const PrefetchPlan& plan, std::span<const std::string> names,
                          std::span<const std::string> folds) {
  std::string order;
  const auto gather = [&](uint32_t use) {
    const Consumption& gathered = plan.uses[use].use;
    fmt::format_to(std::back_inserter(order), "gather {} of {}\n", to_string(gathered.plane), names[gathered.weight]);
  };
  std::ranges::for_each(plan.at_start, gather);
  for (uint32_t use = 0; use < plan.uses.size(); ++use) {
    if (plan.uses[use].on_demand) gather(use);
    std::ranges::for_each(plan.uses[use].prefetches, gather);
  }
  for (const std::string& name : folds) fmt::format_to(std::back_inserter(order), "fold {}\n", name);
  return order;
}

uint64_t digest_of(std::string_view order) {
  return XXH3_64bits(order.data(), order.size());
}

std::optional<OrderDifference> first_difference(std::string_view first, std::string_view second) {
  for (size_t line = 1; !first.empty() || !second.empty(); ++line) {
    const std::string_view one = take_line(first);
    const std::string_view other = take_line(second);
    if (one != other) return OrderDifference{.line = line, .first = one, .second = other};
  }
  return std::nullopt;
}

}  // namespace tessera::etp
