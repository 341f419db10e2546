#include "bus/registration/records.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "base/fields_testing.h"

namespace tessera::bus {
namespace {

TEST(Records, AnotherVersionIsNamed) {
  std::string value = write_record(RankRecord{Incarnation::self(), 4, "/run/agent", "0.1.0", {}});
  EXPECT_EQ(read_record<RankRecord>("key", value).world, 4);
  value[0] = 9;
  try {
    read_record<RankRecord>("key", value);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("version 9"), std::string::npos) << error.what();
  }
}

TEST(Records, ComeBackAsTheyAreDrawn) {
  expect_fields_hold<RankRecord>();
  expect_fields_hold<PairRecord>();
  expect_fields_hold<ManifestRecord>();
  expect_fields_hold<BatchRecord>();
  expect_fields_hold<FailureRecord>();
  expect_fields_hold<RenewalRecord>();
  expect_fields_hold<GatheredRecord>();
}

TEST(Records, AnErrorNamesTheKeyAndTheValue) {
  const std::string value = write_record(RankRecord{Incarnation::self(), 0, "/run/agent", "0.1.0", {}});
  EXPECT_THAT([&] { read_record<RankRecord>("a key", value); },
              testing::ThrowsMessage<Error>(testing::HasSubstr("store key a key: a world of 0")));
}

TEST(Records, AVersionBeyondTheLargestIsRefused) {
  const BatchRecord record{
      .of = {Incarnation::self(), 1}, .version = 1, .newest = kMaxVersion + 1, .hash = {}, .diff = {}};
  EXPECT_THAT([&] { read_record<BatchRecord>("a key", write_record(record)); },
              testing::ThrowsMessage<Error>(testing::HasSubstr("version 1 of 4611686018427387904")));
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
