#include "base/launch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "tessera/error.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

Environment environment(std::map<std::string, std::string> values) {
  return [values = std::move(values)](const char* name) -> const char* {
    const auto found = values.find(name);
    return found == values.end() ? nullptr : found->second.c_str();
  };
}

std::string complaint(const Environment& said) {
  try {
    launched_rank(said);
    launched_world(said);
    return "none";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
}

TEST(Launch, TheFirstLauncherThatSaysItWins) {
  std::map<std::string, std::string> values;
  int value = 10;
  // From the last to the first: each new one takes precedence.
  for (const Launcher& launcher : std::vector<Launcher>(launchers().rbegin(), launchers().rend())) {
    values[std::string(launcher.rank)] = std::to_string(value);
    values[std::string(launcher.world)] = std::to_string(100 + value);
    const std::optional<Said> rank = launched_rank(environment(values));
    ASSERT_TRUE(rank) << launcher.name;
    EXPECT_EQ(rank->value, value);
    EXPECT_EQ(rank->variable, launcher.rank);
    EXPECT_EQ(rank->launcher->name, launcher.name);
    EXPECT_EQ(launched_world(environment(values))->value, 100 + value);
    ++value;
  }
  EXPECT_EQ(launchers().front().rank, "TESSERA_RANK");
  EXPECT_EQ(launchers().back().rank, "SLURM_PROCID");
}

TEST(Launch, NobodySaysIt) {
  EXPECT_FALSE(launched_rank(environment({})));
  EXPECT_FALSE(launched_rank(environment({{"RANK", ""}})));
  EXPECT_EQ(launched_rank(environment({{"RANK", ""}, {"SLURM_PROCID", "0"}}))->value, 0);
}

TEST(Launch, SaysWhereABadNumberCameFrom) {
  EXPECT_THAT(complaint(environment({{"RANK", "two"}})), HasSubstr("RANK is \"two\", not a number from 0 up"));
  EXPECT_THAT(complaint(environment({{"RANK", "1x"}})), HasSubstr("RANK is \"1x\""));
  EXPECT_THAT(complaint(environment({{"PMI_RANK", "-1"}})), HasSubstr("PMI_RANK"));
  EXPECT_THAT(complaint(environment({{"WORLD_SIZE", "0"}})), HasSubstr("WORLD_SIZE is \"0\", not a number from 1 up"));
  EXPECT_EQ(rank_variables(), "TESSERA_RANK, RANK, OMPI_COMM_WORLD_RANK, PMI_RANK or SLURM_PROCID");
}

}  // namespace
}  // namespace tessera
