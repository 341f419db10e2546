#include "bus/registration/records.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace tessera::bus {
namespace {

TEST(Records, AnotherVersionIsNamed) {
  std::string value = RankRecord{Incarnation::self(), 4, "/run/agent", "0.1.0", {}}.write();
  EXPECT_EQ(RankRecord::read("key", value).world, 4);
  value[0] = 9;
  try {
    RankRecord::read("key", value);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("version 9"), std::string::npos) << error.what();
  }
}

TEST(Records, AProcessThatReplacesAnotherMakesAnotherMembership) {
  std::vector<RankRecord> ranks(2);
  for (RankRecord& rank : ranks) rank.incarnation = Incarnation::next();
  const uint64_t before = membership_of(ranks);
  EXPECT_EQ(membership_of(std::vector(ranks)), before);
  std::swap(ranks[0], ranks[1]);
  EXPECT_NE(membership_of(ranks), before);
  std::swap(ranks[0], ranks[1]);
  ranks[1].incarnation = Incarnation::next();
  EXPECT_NE(membership_of(ranks), before);
}

}  // namespace
}  // namespace tessera::bus
