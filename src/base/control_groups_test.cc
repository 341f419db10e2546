#include "base/control_groups.h"

#include <gtest/gtest.h>

#include "base/testing.h"

namespace tessera {
namespace {

TEST(GroupCpus, WithoutAGroupOrALimitThereIsNone) {
  const FakeMachine machine;
  EXPECT_EQ(group_cpus(machine.root()), std::nullopt);
  machine.write("proc/self/cgroup", "0::/job\n");
  machine.write("sys/fs/cgroup/job/cpu.max", "max 100000\n");
  EXPECT_EQ(group_cpus(machine.root()), std::nullopt);
}

TEST(GroupCpus, TheTightestGroupAboveUsCountsRoundedUp) {
  const FakeMachine machine;
  machine.write("proc/self/cgroup", "0::/slice/job\n");
  machine.write("sys/fs/cgroup/cpu.max", "800000 100000\n");
  machine.write("sys/fs/cgroup/slice/cpu.max", "250000 100000\n");
  machine.write("sys/fs/cgroup/slice/job/cpu.max", "max 100000\n");
  EXPECT_EQ(group_cpus(machine.root()), 3u);
  machine.write("sys/fs/cgroup/slice/job/cpu.max", "50000 100000\n");
  EXPECT_EQ(group_cpus(machine.root()), 1u);
}

TEST(GroupCpus, FirstGenerationGroupsAndContainersAreUnderstood) {
  const FakeMachine machine;
  machine.write("proc/self/cgroup", "5:cpuset:/elsewhere\n4:cpu,cpuacct:/seen/from/outside\n0::/\n");
  machine.write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  machine.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  EXPECT_EQ(group_cpus(machine.root()), std::nullopt);
  machine.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "200000\n");
  EXPECT_EQ(group_cpus(machine.root()), 2u);
}

}  // namespace
}  // namespace tessera
