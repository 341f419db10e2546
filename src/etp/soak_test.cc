// A thousand steps hold no more memory, descriptors and threads than the first ones, in threads and in processes.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include "base/testing.h"
#include "collective/group.h"
#include "device/device.h"
#include "etp/etp_testing.h"
#include "tessera/store.h"

namespace tessera::etp {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kKeepsFreed = true;
#else
constexpr bool kKeepsFreed = false;
#endif

constexpr int kSteps = 1000;
constexpr int kWarm = 200;  // steps in which pools find their size
constexpr int64_t kRows = 48, kColumns = 32;
constexpr int64_t kPoolSlack = 5 * kRows * kColumns * 4;  // of the pool of gradients: one of each weight
constexpr int64_t kResidentSlack = int64_t{4} << 20;

int64_t entries(const char* folder) {
  int64_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++count;
  return count;
}

int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t size = 0, resident = 0;
  file >> size >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

struct Held {
  int64_t descriptors = entries("/proc/self/fd");
  int64_t threads = entries("/proc/self/task");
  int64_t resident = resident_bytes();
  int64_t allocated = 0;  // of the device
};

void expect_same(const Held& warm, const Held& late) {
  EXPECT_EQ(late.descriptors, warm.descriptors);
  EXPECT_EQ(late.threads, warm.threads);
  EXPECT_LE(late.allocated, warm.allocated + kPoolSlack);
  if (!kKeepsFreed) {
    EXPECT_LE(late.resident, warm.resident + kResidentSlack);
  }
}

void step(Runtime& runtime, std::span<const WeightId> weights) {
  for (const WeightId w : weights) runtime.acquire(w, Phase::kForward);
  for (size_t i = weights.size(); i-- > 0;) {
    runtime.acquire(weights[i], Phase::kBackward);
    GradientBuffer gradient = runtime.gradient_buffer(weights[i]);
    std::memset(gradient.data(), 0,
                static_cast<size_t>(bytes_of(gradient.dtype(), gradient.rows() * gradient.columns())));
    runtime.produce(std::move(gradient));
  }
  runtime.drain();
  runtime.update(weights, [] {});
}

void soak(const ShardGroup& group) {
  Runtime runtime(group, prefetching());
  std::vector<WeightId> weights;
  for (const char* format : {"f32", "bf16", "mxfp8", "nvfp4", "fp8_e4m3"})
    weights.push_back(runtime.add({.name = format, .rows = kRows, .columns = kColumns, .format = format}));
  runtime.start();
  // A rank looks while the others of its process stand still.
  const auto held = [&] {
    std::optional<Held> now;
    for (int turn = 0; turn < group.size(); ++turn) {
      group.impl()->barrier("turn");
      if (turn == group.rank()) now.emplace();
    }
    group.impl()->barrier("go on");
    now->allocated = static_cast<int64_t>(group.impl()->device().allocated());
    return *now;
  };
  for (int i = 0; i < kWarm; ++i) step(runtime, weights);
  const Held warm = held();
  for (int i = kWarm; i < kSteps; ++i) step(runtime, weights);
  expect_same(warm, held());
}

// The first test: children must not inherit a heap that their parent has used.
TEST(SoakTest, AThousandStepsOfTwoProcessesGrowNothing) {
  const std::string url = "unix:///tmp/tessera-soak." + std::to_string(::getpid());
  pid_t ranks[2] = {};
  for (int rank = 0; rank < 2; ++rank) {
    ranks[rank] = ::fork();
    if (ranks[rank] != 0) continue;
    try {
      const auto store = open_store(url);
      ShardGroup group = ShardGroup::over_store(*store, "soak", rank, 2, test_group());
      soak(group);
      group.close();
    } catch (const std::exception& error) {
      ADD_FAILURE() << "rank " << rank << ": " << error.what();
    }
    std::fflush(nullptr);
    ::_exit(testing::Test::HasFailure() ? 1 : 0);
  }
  const auto server = serve_store(url);
  for (const pid_t rank : ranks) {
    int status = 0;
    ASSERT_EQ(::waitpid(rank, &status, 0), rank);
    EXPECT_EQ(status, 0);
  }
}

TEST(SoakTest, AThousandStepsOfTwoThreadsGrowNothing) {
  run_ranks(2, soak);
}

}  // namespace
}  // namespace tessera::etp
