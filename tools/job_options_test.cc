#include "tools/job_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>

#include "base/fail.h"

namespace tessera::tools {
namespace {

using ::testing::HasSubstr;

Environment environment(std::map<std::string, std::string> values) {
  return [values = std::move(values)](const char* name) -> const char* {
    const auto found = values.find(name);
    return found == values.end() ? nullptr : found->second.c_str();
  };
}

std::string complaint(std::optional<int> rank, std::optional<int> world, const Environment& env) {
  try {
    place_of(rank, world, env);
    return "none";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
}

TEST(PlaceOf, TheOptionsThenTheLauncher) {
  const auto both = environment({{"RANK", "2"}, {"SLURM_PROCID", "5"}, {"WORLD_SIZE", "8"}});
  EXPECT_EQ(place_of(7, {}, both).rank, 7);
  EXPECT_EQ(place_of({}, {}, both).rank, 2);
  EXPECT_EQ(place_of({}, {}, both).world, 8);
  EXPECT_EQ(place_of({}, 4, both).world, 4);
  EXPECT_EQ(place_of(1, 2, environment({{"RANK", "two"}})).rank, 1);
}

TEST(PlaceOf, SaysWhatIsMissingOrWrong) {
  EXPECT_THAT(complaint({}, 2, environment({})), HasSubstr("no --rank: give it, or set TESSERA_RANK, RANK, "));
  EXPECT_THAT(complaint(0, {}, environment({})), HasSubstr("no --world: give it, or set TESSERA_WORLD_SIZE, "));
  EXPECT_THAT(complaint({}, 2, environment({{"RANK", "two"}})), HasSubstr("RANK is \"two\""));
  EXPECT_THAT(complaint(-3, 2, environment({})), HasSubstr("--rank is -3"));
  EXPECT_THAT(complaint(2, 2, environment({})), HasSubstr("--rank 2 of --world 2: ranks go from 0 to 1"));
}

JobOptions options(int rank_given, int world) {
  JobOptions job;
  job.job = "trainer";
  job.peer = "inference";
  job.rank = rank_given;
  job.world = world;
  return job;
}

TEST(JobOptions, ARankOutsideItsWorldIsRefused) {
  EXPECT_EQ(options(3, 4).bus().rank, 3);
  EXPECT_THROW(options(4, 4).bus(), Error);
  EXPECT_THROW(options(0, 0).bus(), Error);
}

TEST(JobOptions, OneTimeoutServesTheRendezvousAndTheTransfer) {
  JobOptions job = options(0, 1);
  EXPECT_EQ(job.rendezvous_timeout(), std::chrono::seconds(300));
  EXPECT_EQ(job.transfer_timeout(), std::chrono::seconds(30));
  job.timeout_s = 2.5;
  EXPECT_EQ(job.rendezvous_timeout(), std::chrono::milliseconds(2500));
  EXPECT_EQ(job.transfer_timeout(), std::chrono::milliseconds(2500));
  for (const double bad : {0.0, -1.0, 1e12, std::numeric_limits<double>::quiet_NaN()}) {
    job.timeout_s = bad;
    EXPECT_THROW(job.transfer_timeout(), Error) << bad;
  }
}

}  // namespace
}  // namespace tessera::tools
