#include "memory/host/memory_limit.h"

#include <gtest/gtest.h>

#include "base/testing.h"

namespace tessera {
namespace {

class MemoryLimitsTest : public testing::Test {
 protected:
  MemoryLimitsTest() { machine.write("proc/meminfo", "MemTotal: 4000 kB\nMemAvailable:   1000 kB\n"); }
  MemoryLimits limits() const { return read_memory_limits(machine.root()); }

  const FakeMachine machine;
};

TEST_F(MemoryLimitsTest, WithoutGroupsOnlyWhatTheMachineHas) {
  EXPECT_EQ(limits().available, 1000u * 1024);
  EXPECT_FALSE(limits().group_left);
}

TEST_F(MemoryLimitsTest, TheTightestGroupAboveUsCountsAndItsCacheIsFree) {
  machine.write("proc/self/cgroup", "0::/slice/job\n");
  machine.write("sys/fs/cgroup/slice/job/memory.max", "max\n");
  machine.write("sys/fs/cgroup/slice/job/memory.current", "500\n");
  machine.write("sys/fs/cgroup/slice/memory.max", "10000\n");
  machine.write("sys/fs/cgroup/slice/memory.current", "9000\n");
  machine.write("sys/fs/cgroup/slice/memory.stat", "anon 5000\ninactive_file 1500\nactive_file 500\n");
  EXPECT_EQ(limits().group_left, 3000u);
}

TEST_F(MemoryLimitsTest, FirstGenerationGroupsAndContainersAreUnderstood) {
  machine.write("proc/self/cgroup", "4:memory:/seen/from/outside\n0::/\n");
  machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "8000\n");
  machine.write("sys/fs/cgroup/memory/memory.usage_in_bytes", "8200\n");
  EXPECT_EQ(limits().group_left, 0u);
}

TEST_F(MemoryLimitsTest, ALimitBeyondTheMachinesMemoryIsNone) {
  machine.write("proc/self/cgroup", "4:memory:/job\n");
  machine.write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "8200\n");
  machine.write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_FALSE(limits().group_left);
  machine.write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "4096000\n");  // all of it
  EXPECT_FALSE(limits().group_left);
  machine.write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "4095000\n");
  EXPECT_EQ(limits().group_left, 4095000u - 8200u);
}

TEST(RequireMemory, NamesEveryFigure) {
  const MemoryLimits limits{.available = 5000, .group_left = 3000, .group_limit_file = "/sys/fs/cgroup/memory.max"};
  EXPECT_NO_THROW(require_memory(3000, "shared memory", limits));
  try {
    require_memory(3001, "shared memory", limits);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kResourceExhausted);
    EXPECT_STREQ(
        error.what(),
        "shared memory: 3001 bytes wanted; MemAvailable is 5000 bytes, /sys/fs/cgroup/memory.max leaves 3000 bytes");
  }
}

}  // namespace
}  // namespace tessera
