#include "base/launch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>

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
    launched(said);
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
    const auto [rank, world] = launched(environment(values));
    ASSERT_TRUE(rank && world) << launcher.name;
    EXPECT_EQ(rank->value, value);
    EXPECT_EQ(rank->variable, launcher.rank);
    EXPECT_EQ(rank->launcher->name, launcher.name);
    EXPECT_EQ(world->value, 100 + value);
    ++value;
  }
  EXPECT_EQ(launchers().front().rank, "TESSERA_RANK");
  EXPECT_EQ(launchers().back().rank, "SLURM_PROCID");
}

TEST(Launch, NobodySaysIt) {
  for (const Environment& nothing : {environment({}), environment({{"RANK", ""}, {"WORLD_SIZE", ""}})}) {
    EXPECT_FALSE(launched(nothing).rank);
    EXPECT_FALSE(launched(nothing).world);
  }
}

// (rank, world) that the variables say; -1: nothing.
std::pair<int, int> said(const std::map<std::string, std::string>& variables, Given given = {}) {
  const auto [rank, world] = launched(environment(variables), given);
  return {rank ? rank->value : -1, world ? world->value : -1};
}

TEST(Launch, ALauncherThatSaysHalfOfItIsPassedOver) {
  using Pair = std::pair<int, int>;
  EXPECT_EQ(said({{"SLURM_NTASKS", "4"}}), Pair(-1, -1)) << "a shell of salloc";
  EXPECT_EQ(said({{"RANK", ""}, {"WORLD_SIZE", "2"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}}), Pair(0, 4));
  EXPECT_EQ(said({{"TESSERA_RANK", "1"}, {"RANK", "0"}, {"WORLD_SIZE", "2"}}), Pair(1, 2));
  EXPECT_EQ(said({{"TESSERA_RANK", "1"}, {"WORLD_SIZE", "2"}}), Pair(1, 2));
  EXPECT_EQ(said({{"TESSERA_WORLD_SIZE", "3"}}), Pair(-1, 3)) << "whoever says that means it";
  EXPECT_EQ(said({{"SLURM_NTASKS", "4"}}, {.rank = true}), Pair(-1, 4));
  EXPECT_EQ(said({{"SLURM_PROCID", "2"}}, {.world = true}), Pair(2, -1));
  EXPECT_EQ(said({{"RANK", "two"}, {"WORLD_SIZE", "1"}}, {.rank = true}), Pair(-1, 1)) << "the rank was not asked for";
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
