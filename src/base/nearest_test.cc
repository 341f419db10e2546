#include "base/nearest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

const std::vector<std::string_view> kCommands{"store", "agent", "send", "recv", "top", "plan", "bench", "doctor"};

TEST(NearestTest, AFewLettersMayBeWrong) {
  EXPECT_THAT(nearest("sned", kCommands), ElementsAre("send"));
  EXPECT_THAT(nearest("stroe", kCommands), ElementsAre("store"));
  EXPECT_THAT(nearest("docter", kCommands), ElementsAre("doctor"));
  EXPECT_THAT(nearest("pln", kCommands), ElementsAre("plan"));
  EXPECT_THAT(nearest("receive", kCommands), IsEmpty());
  EXPECT_THAT(nearest("", kCommands), IsEmpty());
}

TEST(NearestTest, APrefixMayBeMissingOrTooMuch) {
  const std::vector<std::string_view> names{"lm_head.weight", "model.embed.weight", "model.layers.0.mlp.up.weight"};
  EXPECT_THAT(nearest("embed.weight", names), ElementsAre("model.embed.weight"));
  EXPECT_THAT(nearest("module.lm_head.weight", names), ElementsAre("lm_head.weight"));
}

TEST(NearestTest, TheNearestComesFirstAndThreeAreEnough) {
  const std::vector<std::string_view> names{"layers.100.w", "layers.11.w", "layers.12.w", "layers.13.w", "layers.1.w"};
  const std::vector<std::string_view> best = nearest("layers.1.v", names);
  ASSERT_EQ(best.size(), 3U);
  EXPECT_EQ(best.front(), "layers.1.w");
  EXPECT_EQ(did_you_mean("layers.1.v", names), "; did you mean layers.1.w, layers.11.w or layers.12.w?");
  EXPECT_EQ(did_you_mean("bias", names), "");
}

TEST(NearestTest, LongAndManyNamesCostLittle) {
  const std::string long_name(100'000, 'x');
  EXPECT_THAT(nearest(long_name, kCommands), IsEmpty());
  const std::vector<std::string_view> many(200'000, long_name);
  EXPECT_THAT(nearest("xx", many), IsEmpty());
}

}  // namespace
}  // namespace tessera
