#include "etp/schedule/planned_order.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace tessera::etp {
namespace {

// `c` stands for a list of experts.
std::string order_of(const std::vector<uint32_t>& uses, const PrefetchOptions& options,
                     const std::vector<std::string>& folds = {}) {
  const std::vector<GatherCost> costs{{.row = {{0, 10}}}, {.row = {{1, 20}}}, {.experts = true, .row = {{2, 40}}}};
  const std::vector<std::string> names{"a", "b", "c"};
  std::vector<Consumption> observed;
  for (const uint32_t weight : uses) observed.push_back({.weight = weight});
  observed.back().plane = Plane::kColumn;
  return planned_order(plan_prefetch(observed, costs, options), names, folds);
}

TEST(PlannedOrder, HasGathersAsTheyAreIssuedAndThenFolds) {
  const std::string in_order = "gather row of a\ngather row of b\ngather column of c\n";
  EXPECT_EQ(order_of({0, 1, 2}, {.weight_prefetch = false}), in_order);
  EXPECT_EQ(order_of({0, 1, 2}, {}, {"b", "a"}), in_order + "fold b\nfold a\n");
  // Two uses ahead is farther than the next one.
  EXPECT_EQ(order_of({0, 1, 2}, {.distance = 0, .expert_distance = 2}),
            "gather row of a\ngather column of c\ngather row of b\n");
}

TEST(PlannedOrder, HasADigest) {
  EXPECT_EQ(digest_of(order_of({0, 1, 2}, {.distance = 1})), digest_of(order_of({0, 1, 2}, {.distance = 2})));
  EXPECT_NE(digest_of(order_of({0, 1, 2}, {.distance = 1})), digest_of(order_of({1, 0, 2}, {.distance = 1})));
}

TEST(FirstDifference, IsALineThatDiffersOrThatOneLacks) {
  const auto expect = [](std::string_view first, std::string_view second, size_t line, std::string_view of_first,
                         std::string_view of_second) {
    const auto found = first_difference(first, second);
    ASSERT_TRUE(found);
    EXPECT_EQ(found->line, line);
    EXPECT_EQ(found->first, of_first);
    EXPECT_EQ(found->second, of_second);
  };
  expect("x\ny\nz\n", "x\nw\nz\n", 2, "y", "w");
  expect("x\ny\n", "x\n", 2, "y", "");
  expect("", "x\ny\n", 1, "", "x");
  expect("x", "xx", 1, "x", "xx");
  expect("x\n\n\n", "x\n\ny\n", 3, "", "y");
  EXPECT_FALSE(first_difference("x\ny\n", "x\ny\n"));
  EXPECT_FALSE(first_difference("", ""));
}

}  // namespace
}  // namespace tessera::etp
