#include "bus/registration/records.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace tessera::bus
