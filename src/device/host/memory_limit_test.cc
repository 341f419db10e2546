#include "device/host/memory_limit.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "tessera/error.h"

namespace tessera {
namespace {

// A small imitation of /proc and /sys.
class FakeMachine {
 public:
  FakeMachine() : root_(std::filesystem::temp_directory_path() / ("memory_limit_test." + std::to_string(::getpid()))) {
    write("proc/meminfo", "MemTotal: 4000 kB\nMemAvailable:   1000 kB\n");
  }
  ~FakeMachine() { std::filesystem::remove_all(root_); }
  void write(const std::string& name, const std::string& text) {
    std::filesystem::create_directories((root_ / name).parent_path());
    std::ofstream(root_ / name) << text;
  }
  MemoryLimits limits() const { return read_memory_limits(root_.string()); }

 private:
  std::filesystem::path root_;
};

TEST(MemoryLimits, WithoutGroupsOnlyWhatTheMachineHas) {
  const FakeMachine machine;
  EXPECT_EQ(machine.limits().available, 1000u * 1024);
  EXPECT_FALSE(machine.limits().group_left);
}

TEST(MemoryLimits, TheTightestGroupAboveUsCountsAndItsCacheIsFree) {
  FakeMachine machine;
  machine.write("proc/self/cgroup", "0::/slice/job\n");
  machine.write("sys/fs/cgroup/slice/job/memory.max", "max\n");
  machine.write("sys/fs/cgroup/slice/job/memory.current", "500\n");
  machine.write("sys/fs/cgroup/slice/memory.max", "10000\n");
  machine.write("sys/fs/cgroup/slice/memory.current", "9000\n");
  machine.write("sys/fs/cgroup/slice/memory.stat", "anon 5000\ninactive_file 1500\nactive_file 500\n");
  EXPECT_EQ(machine.limits().group_left, 3000u);
}

TEST(MemoryLimits, FirstGenerationGroupsAndContainersAreUnderstood) {
  FakeMachine machine;
  machine.write("proc/self/cgroup", "4:memory:/seen/from/outside\n0::/\n");
  machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "8000\n");
  machine.write("sys/fs/cgroup/memory/memory.usage_in_bytes", "8200\n");
  EXPECT_EQ(machine.limits().group_left, 0u);
}

TEST(MemoryLimits, ALimitBeyondTheMachinesMemoryIsNone) {
  FakeMachine machine;
  machine.write("proc/self/cgroup", "4:memory:/job\n");
  machine.write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "8200\n");
  machine.write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_FALSE(machine.limits().group_left);
  machine.write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "4096000\n");  // all of it
  EXPECT_FALSE(machine.limits().group_left);
  machine.write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "4095000\n");
  EXPECT_EQ(machine.limits().group_left, 4095000u - 8200u);
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
