#include "tools/job_options.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <limits>
#include <string>

#include "base/fail.h"

namespace tessera::tools {
namespace {

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

TEST(JobOptions, WithoutARankAndALauncherAProcessIsAJobOfItsOwn) {
  for (const Launcher& launcher : launchers())
    for (const std::string_view variable : {launcher.rank, launcher.world}) ::unsetenv(std::string(variable).c_str());
  JobOptions job;
  EXPECT_EQ(job.bus().rank, 0);
  EXPECT_EQ(job.bus().world, 1);
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
