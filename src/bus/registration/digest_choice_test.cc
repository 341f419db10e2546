#include "bus/registration/digest_choice.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace tessera::bus {
namespace {

constexpr std::string_view kSession = "0123456789abcdef", kAnother = "1123456789abcdef";

TEST(DigestChoice, TheWeakerOfTwoHolds) {
  constexpr DigestMode kOrder[] = {DigestMode::kOff, DigestMode::kSampled, DigestMode::kFull};
  for (size_t a = 0; a < 3; ++a)
    for (size_t b = 0; b < 3; ++b) EXPECT_EQ(weaker(kOrder[a], kOrder[b]), kOrder[std::min(a, b)]);
}

TEST(DigestChoice, SessionsHaveSamplesOfTheirOwn) {
  EXPECT_TRUE(session_sample(DigestMode::kSampled, false, kSession));
  EXPECT_EQ(session_sample(DigestMode::kSampled, false, kSession),
            session_sample(DigestMode::kSampled, false, std::string(kSession)));
  EXPECT_NE(session_sample(DigestMode::kSampled, false, kSession),
            session_sample(DigestMode::kSampled, false, kAnother));
}

TEST(DigestChoice, FullDigestsHaveNoSamplesAndSoHaveDeltas) {
  EXPECT_FALSE(session_sample(DigestMode::kFull, false, kSession));
  EXPECT_FALSE(session_sample(DigestMode::kOff, false, kSession));
  EXPECT_FALSE(session_sample(DigestMode::kSampled, true, kSession));
}

}  // namespace
}  // namespace tessera::bus
