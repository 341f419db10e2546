// Twenty thousand random redistributions, each checked element by element.
#include <gtest/gtest.h>

#include "plan/testing/property_check.h"

namespace tessera::plan {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kCases = 250;
#else
constexpr int kCases = 2500;
#endif

class RandomRedistribution : public testing::TestWithParam<uint64_t> {};

TEST_P(RandomRedistribution, WritesEveryElementOnceFromARankThatHoldsItWithTheFewestBytes) {
  RandomLayouts with_partial(GetParam(), {});
  RandomLayouts without_partial(GetParam() + 1000, {.ops = {}});
  int planned = 0;
  while (planned < kCases) {
    const Case c = random_case(with_partial, without_partial);
    if (check_case(c)) ++planned;
    if (HasFailure()) FAIL() << "seed " << GetParam() << ", case " << planned << ": " << c.text();
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomRedistribution, testing::Range<uint64_t>(1, 9));

}  // namespace
}  // namespace tessera::plan
