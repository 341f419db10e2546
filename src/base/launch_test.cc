#include "base/launch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>

#include "base/testing.h"
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
  // From the last to the first: each one that is added takes precedence.
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

// (rank, world) as the variables set them; -1: not set.
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

TEST(Launch, APlaceIsWhatTheArgumentsThenTheLauncherThenTheGroupSay) {
  using Pair = std::pair<int, int>;
  const auto place = [](std::optional<int> rank, std::optional<int> world, std::map<std::string, std::string> variables,
                        std::optional<Place> group = std::nullopt) {
    const Place own = own_place(rank, world, environment(std::move(variables)), group);
    return Pair(own.rank, own.world);
  };
  const std::map<std::string, std::string> said{{"RANK", "2"}, {"SLURM_PROCID", "5"}, {"WORLD_SIZE", "8"}};
  EXPECT_EQ(place({}, {}, {}), Pair(0, 1)) << "nobody says it";
  EXPECT_EQ(place({}, 2, {}), Pair(0, 2));
  EXPECT_EQ(place(7, {}, said), Pair(7, 8));
  EXPECT_EQ(place({}, {}, said), Pair(2, 8));
  EXPECT_EQ(place({}, 4, said), Pair(2, 4));
  EXPECT_EQ(place(1, 2, {{"RANK", "two"}}), Pair(1, 2));
  EXPECT_EQ(place({}, {}, {}, Place{.rank = 3, .world = 4}), Pair(3, 4));
  EXPECT_EQ(place({}, {}, said, Place{.rank = 3, .world = 4}), Pair(2, 8));
}

TEST(Launch, APlaceThatCannotBeSaysWhoSaysIt) {
  const auto complaint = [](std::optional<int> rank, std::optional<int> world,
                            std::map<std::string, std::string> variables) {
    return error_of([&] { own_place(rank, world, environment(std::move(variables))); });
  };
  const std::string why = "): ranks go from 0 to world - 1";
  EXPECT_EQ(complaint(2, 2, {}), "rank 2 of world 2 (rank from the arguments, world from the arguments" + why);
  EXPECT_EQ(complaint(3, {}, {}), "rank 3 of world 1 (rank from the arguments, world from nobody" + why);
  EXPECT_EQ(complaint(-1, {}, {{"WORLD_SIZE", "2"}}),
            "rank -1 of world 2 (rank from the arguments, world from WORLD_SIZE" + why);
  EXPECT_EQ(complaint(0, 0, {}), "rank 0 of world 0 (rank from the arguments, world from the arguments" + why);
}

TEST(Launch, SaysWhereABadNumberCameFrom) {
  EXPECT_THAT(complaint(environment({{"RANK", "two"}})), HasSubstr("RANK is \"two\", not a number from 0 up"));
  EXPECT_THAT(complaint(environment({{"RANK", "1x"}})), HasSubstr("RANK is \"1x\""));
  EXPECT_THAT(complaint(environment({{"PMI_RANK", "-1"}})), HasSubstr("PMI_RANK"));
  EXPECT_THAT(complaint(environment({{"WORLD_SIZE", "0"}})), HasSubstr("WORLD_SIZE is \"0\", not a number from 1 up"));
}

}  // namespace
}  // namespace tessera
