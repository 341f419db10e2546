// Weights that are removed: when their memory is freed, what others and FullWeights see until then and behind it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <latch>
#include <memory>
#include <thread>
#include <vector>

#include "base/testing.h"
#include "collective/group.h"
#include "etp/etp_testing.h"

namespace tessera::etp {
namespace {

using collective::kWholeRank;
using collective::Word;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::SizeIs;

constexpr int64_t kLeavingRows = 64, kLeavingColumns = 1024;  // of which each of two ranks has whole pages
const WeightSpec kLeaves{.name = "leaves", .rows = kLeavingRows, .columns = kLeavingColumns};
const WeightSpec kStays{.name = "stays", .rows = 40, .columns = 4};

int64_t shared_bytes(const Runtime& runtime) {
  const RuntimeReport report = runtime.report();
  return report.shard_bytes + report.publication_bytes;
}

struct LeavesAndStays {
  WeightId leaves, stays;
};

LeavesAndStays started(Runtime& runtime, const WeightSpec& leaves = kLeaves) {
  const LeavesAndStays weights{runtime.add(leaves), runtime.add(kStays)};
  if (!leaves.native) fill_shard(runtime, weights.leaves, 1);
  fill_shard(runtime, weights.stays, 1);
  runtime.start();
  return weights;
}

// Of one weight, as of a training loop; `version` is published at its end.
void step(Runtime& runtime, WeightId w, int64_t version) {
  EXPECT_EQ(wrong_elements(runtime.acquire(w, Phase::kForward), w, version - 1), 0);
  produce_ones(runtime, w);
  runtime.drain();
  runtime.update({{w}}, [&] { fill_shard(runtime, w, version); });
}

TEST(RemovalTest, MemoryIsFreedByTheFirstDrainBeforeWhichAllRanksHaveRemovedTheWeight) {
  for (const bool prefetches : {false, true})
    run_ranks(3, [&](ShardGroup group) {
      Runtime runtime(group, prefetches ? prefetching() : RuntimeOptions{.prefetch = PrefetchMode::kOff});
      const LeavesAndStays w = started(runtime);
      for (int64_t version = 2; version <= 4; ++version) {  // a plan that has both
        EXPECT_EQ(wrong_elements(runtime.acquire(w.leaves, Phase::kForward), w.leaves, 1), 0);
        step(runtime, w.stays, version);
      }
      const std::weak_ptr<void> shard = runtime.shard_keeper(w.leaves);
      const int64_t all = shared_bytes(runtime);
      if (group.rank() == 0) runtime.remove({{w.leaves}});
      runtime.drain();
      EXPECT_EQ(shared_bytes(runtime), all);
      if (group.rank() != 0) {
        EXPECT_EQ(wrong_elements(runtime.acquire(w.leaves, Phase::kForward), w.leaves, 1), 0);
        runtime.remove({{w.leaves}});
      }
      EXPECT_EQ(shared_bytes(runtime), all);
      step(runtime, w.stays, 5);
      const RuntimeReport report = runtime.report();
      ASSERT_THAT(report.weights, SizeIs(1));
      EXPECT_EQ(report.weights[0].name, "stays");
      EXPECT_EQ(report.shard_bytes, runtime.rows(w.stays).size() * 4 * 4);
      EXPECT_EQ(runtime.forecast().parameters, report.shard_bytes);
      for (int64_t version = 6; version <= 8; ++version) step(runtime, w.stays, version);
    });
}

TEST(RemovalTest, TheDeviceHasTheMemoryAgain) {
  for (const char* format : {"", "bf16", "mxfp8"})
    run_ranks(2, [&](ShardGroup group) {
      Runtime runtime(group, {});
      started(runtime);
      runtime.drain();
      std::vector<size_t> allocated;
      for (int64_t version = 1; version <= 5; ++version) {
        WeightSpec spec = kLeaves;
        spec.format = format;
        spec.gradient = DType::kF32;  // as produce_ones() writes
        const WeightId w = runtime.add(spec);
        fill_shard(runtime, w, 1);
        runtime.start();
        runtime.acquire(w, Phase::kForward);
        produce_ones(runtime, w);
        runtime.drain();
        runtime.remove({{w}});
        for (int i = 0; i < 2; ++i) runtime.update({}, [] {});  // idle buffers of its gathers go, too
        allocated.push_back(group.impl()->device().allocated());
      }
      EXPECT_THAT(allocated, testing::Each(allocated.front()));
    });
}

TEST(RemovalTest, ARankThatHasRemovedAWeightServesAndFoldsItForOthers) {
  run_ranks(2, [](ShardGroup group) {
    Runtime runtime(group, prefetching());
    const LeavesAndStays w = started(runtime);
    if (group.rank() == 1) runtime.remove({{w.leaves}});
    runtime.drain();
    if (group.rank() == 0) {
      EXPECT_EQ(wrong_elements(runtime.acquire(w.leaves, Phase::kForward), w.leaves, 1), 0);
      produce_ones(runtime, w.leaves);
    }
    const std::vector<Added> added = runtime.drain();
    EXPECT_THAT(added, ElementsAre(Added{.weight = w.leaves, .round = 0, .ranks = 1}));
    if (group.rank() == 0) runtime.remove({{w.leaves}});
    runtime.drain();
    EXPECT_THAT(runtime.report().weights, SizeIs(1));
    EXPECT_EQ(runtime.report().gradient_bytes, 0);
  });
}

TEST(RemovalTest, AFullWeightShowsWhatItHasShown) {
  for (const bool maps : {true, false})
    run_ranks(2, [&](ShardGroup group) {
      Runtime runtime(group, {.prefetch = PrefetchMode::kOff, .map_weights = maps});
      const LeavesAndStays w = started(runtime);
      EXPECT_EQ(runtime.is_mapped(w.leaves), maps);
      const FullWeight full = runtime.acquire(w.leaves, Phase::kForward);
      runtime.remove({{w.leaves}});
      runtime.drain();
      const WeightId next = runtime.add(kLeaves);  // in the memory that is free
      fill_shard(runtime, next, 7);
      runtime.start();
      EXPECT_EQ(wrong_elements(full, w.leaves, 1), 0);
      EXPECT_EQ(wrong_elements(runtime.acquire(next, Phase::kForward), next, 7), 0);
    });
}

TEST(RemovalTest, AStackIsOneBlockUntilItsLastWeightIsRemoved) {
  run_ranks(2, [](ShardGroup group) {
    Runtime runtime(group, {.prefetch = PrefetchMode::kOff});
    const size_t before = group.impl()->device().allocated();
    const std::vector<WeightId> stack =
        runtime.add_stack({.name = "up", .rows = kLeavingRows, .columns = kLeavingColumns}, 3);
    for (const WeightId w : stack) fill_shard(runtime, w, 1);
    runtime.start();
    runtime.remove({{stack[0]}});
    runtime.drain();
    EXPECT_EQ(wrong_elements(runtime.acquire(stack[1], Phase::kForward), stack[1], 1), 0);
    EXPECT_THAT(error_of([&] { runtime.acquire(stack, Phase::kForward); }), HasSubstr("\"up[0]\" has been removed"));
    runtime.remove({{stack[1], stack[2]}});
    runtime.drain();
    EXPECT_THAT(runtime.report().weights, SizeIs(0));
    for (int i = 0; i < 2; ++i) runtime.update({}, [] {});
    EXPECT_EQ(group.impl()->device().allocated(), before);
  });
}

TEST(RemovalTest, WhatCannotBeIsAnErrorAndChangesNothing) {
  run_ranks(2, [](ShardGroup group) {
    Runtime runtime(group, {});
    const LeavesAndStays w = started(runtime);
    const auto remove = [&] { runtime.remove({{w.leaves}}); };
    runtime.begin_update({{w.stays}});
    EXPECT_THAT(error_of(remove), HasSubstr("inside an update"));
    runtime.end_update();
    produce_ones(runtime, w.leaves);
    EXPECT_THAT(error_of(remove), HasSubstr("\"leaves\" has a gradient in flight: drain() first"));
    runtime.drain();
    EXPECT_EQ(wrong_elements(runtime.acquire(w.leaves, Phase::kForward), w.leaves, 1), 0);
    remove();
    for (const auto& call : std::vector<std::function<void()>>{
             remove, [&] { runtime.acquire(w.leaves, Phase::kForward); }, [&] { runtime.gradient_buffer(w.leaves); },
             [&] { runtime.begin_update({{w.leaves}}); }, [&] { runtime.set_frozen(w.leaves, true); },
             [&] { runtime.rows(w.leaves); }, [&] { runtime.status(w.leaves); }})
      EXPECT_THAT(error_of(call), HasSubstr("\"leaves\" has been removed"));
    EXPECT_THAT(error_of([&] { runtime.remove({{w.stays, 99}}); }), HasSubstr("there is no weight 99"));
    step(runtime, w.stays, 2);
  });
}

TEST(RemovalTest, AWeightThatHasNotStartedIsGoneAtOnce) {
  run_ranks(2, [](ShardGroup group) {
    Runtime runtime(group, {});
    const LeavesAndStays w = started(runtime);
    const WeightId fresh = runtime.add({.name = "fresh", .rows = 40, .columns = 4});
    runtime.remove({{fresh}});
    EXPECT_THAT(runtime.report().weights, SizeIs(2));
    runtime.start();
    step(runtime, w.stays, 2);
  });
}

TEST(RemovalTest, CapturesAreDestroyedFirst) {
  run_ranks(2, [](ShardGroup group) {
    RuntimeOptions options = prefetching();
    options.graph_scope = {"attn"};
    Runtime runtime(group, options);
    const LeavesAndStays w = started(runtime);
    {
      const CapturedStep captured = runtime.capture([] {});
      EXPECT_THAT(error_of([&] { runtime.remove({{w.leaves}}); }), HasSubstr("captures of them live"));
    }
    runtime.remove({{w.leaves}});
  });
}

// It would have what the others have freed, in another interval than they.
TEST(RemovalTest, ARankThatIsInterruptedAmidADrainComesThroughItWithTheOthers) {
  std::latch held(1), exchanges(1), through(2);
  run_ranks(3, [&](ShardGroup group) {
    struct Stopped {};
    RuntimeOptions options;
    bool drains = false;
    options.while_waiting = [&] {
      if (!drains) return;
      if (group.rank() == 2 && !exchanges.try_wait()) {
        held.count_down();
        exchanges.wait();
      }
      if (group.rank() != 1) return;
      for (int rank = 0; rank < 3; ++rank)
        if (group.impl()->get(rank, Word::kClosed, kWholeRank) < 1) return;
      exchanges.count_down();  // it waits for rank 2 only, and for what that tells
      through.wait();
      throw Stopped();
    };
    Runtime runtime(group, options);
    const LeavesAndStays w = started(runtime);
    runtime.remove({{w.leaves}});
    group.impl()->barrier("removed");
    drains = true;
    if (group.rank() == 0) held.wait();
    if (group.rank() == 1) {
      EXPECT_THROW(runtime.drain(), Stopped);
    } else {
      runtime.drain();
      EXPECT_THAT(runtime.report().weights, SizeIs(1));
      through.count_down();
    }
    drains = false;
    runtime.abandon();
    EXPECT_THAT(runtime.report().weights, SizeIs(1));
    for (int64_t version = 2; version < 5; ++version) step(runtime, w.stays, version);
  });
}

TEST(RemovalTest, ManyWeightsComeAndGo) {
  run_ranks(2, [](ShardGroup group) {
    Runtime runtime(group, prefetching());
    const LeavesAndStays w = started(runtime);
    WeightId last = w.leaves;
    for (int64_t version = 2; version < 200; ++version) {
      EXPECT_EQ(runtime.acquire(last, Phase::kForward).rows(), kLeavingRows);
      runtime.remove({{last}});
      last = runtime.add(kLeaves);
      fill_shard(runtime, last, version);
      runtime.start();
      EXPECT_EQ(wrong_elements(runtime.acquire(last, Phase::kForward), last, version), 0);
      step(runtime, w.stays, version);
      ASSERT_THAT(runtime.report().weights, SizeIs(2));
    }
  });
}

}  // namespace
}  // namespace tessera::etp
