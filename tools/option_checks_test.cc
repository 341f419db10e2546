#include "tools/option_checks.h"

#include <gtest/gtest.h>

#include <limits>

namespace tessera::tools {
namespace {

TEST(OptionChecks, AWholeNumberStandsAloneAndWithinItsBounds) {
  const OptionCheck check = whole_number("a version", 1000);
  for (const char* right : {"1", "007", "1000"}) EXPECT_EQ(check(right), "") << right;
  for (const char* wrong : {"0", "-1", "", "x", "1x", " 1", "1.5", "+1", "-9223372036854775809"})
    EXPECT_EQ(check(wrong), "a version is a whole number from 1 (not \"" + std::string(wrong) + "\")");
  for (const char* large : {"1001", "9223372036854775808"})
    EXPECT_EQ(check(large), "a version is a whole number from 1 to 1000 (not \"" + std::string(large) + "\")");
  const int64_t largest = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(whole_number("a version", largest)(std::to_string(largest)), "");
  EXPECT_LT(check(std::string(10'000, '9')).size(), 200u);
}

TEST(OptionChecks, AWholeNumberMayBeginAtZero) {
  const OptionCheck check = whole_number("a rank", 1000, 0);
  for (const char* right : {"0", "1000"}) EXPECT_EQ(check(right), "") << right;
  EXPECT_EQ(check("-1"), "a rank is a whole number from 0 (not \"-1\")");
}

TEST(OptionChecks, SecondsAreANumberWithinTheirBounds) {
  const OptionCheck check = seconds_between(0.1, 3600);
  for (const char* right : {"0.1", "1", "1e3", "3600"}) EXPECT_EQ(check(right), "") << right;
  for (const char* wrong : {"0.09", "3601", "-1", "nan", "inf", "1e999", "", "x", "1s"})
    EXPECT_EQ(check(wrong), "0.1 to 3600 seconds are possible (not \"" + std::string(wrong) + "\")");
}

TEST(OptionChecks, AnEmptyValueIsNoValue) {
  EXPECT_NE(not_empty()(""), "");
  EXPECT_EQ(not_empty()(" "), "");
}

}  // namespace
}  // namespace tessera::tools
