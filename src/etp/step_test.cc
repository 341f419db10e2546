// What a step may meet: errors, other orders, ranks that differ, threads, the end of things.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <latch>
#include <limits>
#include <thread>
#include <vector>

#include "base/testing.h"
#include "collective/group.h"
#include "collective/leftovers.h"
#include "device/condition.h"
#include "etp/etp_testing.h"
#include "tessera/memory.h"

namespace tessera::etp {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

TEST(StepTest, OneRankUsesItsShardItself) {
  Runtime runtime(ShardGroup::single(test_group()), prefetching());
  const WeightId w = runtime.add({.name = "w", .rows = 5, .columns = 3});
  runtime.start();
  {
    const FullWeight full = runtime.acquire(w, Phase::kForward);
    EXPECT_EQ(full.data(), runtime.shard(w));
  }
  produce_ones(runtime, w, 2);
  EXPECT_THAT(runtime.drain(), testing::ElementsAre(Added{.weight = w, .round = 0, .ranks = 1}));
  EXPECT_EQ(*static_cast<float*>(runtime.gradient(w)), 2.0F);
  EXPECT_EQ(runtime.report().gathered_bytes, 0);
}

TEST(StepTest, ABackwardAfterAnUpdateIsAnErrorThatNamesTheWeight) {
  run_ranks(2, [](ShardGroup group) {
    Runtime runtime(group, prefetching());
    const WeightId w = runtime.add({.name = "head.weight", .rows = 20, .columns = 4});
    runtime.start();
    const int64_t version = runtime.acquire(w, Phase::kForward).version();
    runtime.update({{w}}, [] {});
    EXPECT_THAT(error_of([&] { runtime.acquire(w, Phase::kBackward, {.version = version}); }),
                HasSubstr("head.weight\" has been updated between its forward, which used version 1"));
    EXPECT_EQ(runtime.acquire(w, Phase::kBackward, {.version = version + 1}).version(), 2);
  });
}

TEST(StepTest, AWriteOutsideOfAnUpdateIsAnErrorWithItsRow) {
  run_ranks(2, [](ShardGroup group) {
    Runtime runtime(group, prefetching());
    const WeightId w = runtime.add({.name = "w", .rows = 40, .columns = 4});
    runtime.start();
    if (group.rank() == 1) reinterpret_cast<float*>(runtime.shard(w))[3 * 4] = 7;
    const std::string error = error_of([&] { runtime.begin_update({{w}}); });
    if (group.rank() == 1)
      EXPECT_THAT(error, HasSubstr("\"w\": row 35 has been written since version 1 was published"));
    else
      EXPECT_EQ(error, "(no error)");
  });
}

TEST(StepTest, BuffersMayOutliveTheRuntimeAndTheGroup) {
  std::vector<FullWeight> kept(2);
  std::vector<GradientBuffer> gradients(2);
  std::vector<std::shared_ptr<void>> shards(2);
  run_ranks(2, [&](ShardGroup group) {
    Runtime runtime(group, prefetching());
    const WeightId w = runtime.add({.name = "w", .rows = 32, .columns = 4});
    fill_shard(runtime, w, 1);
    runtime.start();
    const auto rank = static_cast<size_t>(group.rank());
    kept[rank] = runtime.acquire(w, Phase::kForward);
    gradients[rank] = runtime.gradient_buffer(w);
    shards[rank] = runtime.shard_keeper(w);
    runtime.update({{w}}, [&] { fill_shard(runtime, w, 2); });
    runtime.close();
    EXPECT_THAT(error_of([&] { runtime.acquire(w, Phase::kForward); }), HasSubstr("the runtime is closed"));
  });
  for (const FullWeight& full : kept) EXPECT_EQ(wrong_elements(full, 0, 1), 0);
  std::thread([&] {
    kept.clear();
    gradients.clear();
    shards.clear();
  }).join();
}

// Memory that was freed would be given to whatever comes next.
TEST(StepTest, WeightsAreReadAfterTheirOwnerHasClosedItsRuntime) {
  for (const char* const format : {"", "bf16", "nvfp4"}) {
    std::latch seen(1);
    std::latch overwritten(1);
    run_ranks(2, [&](ShardGroup group) {
      {
        Runtime runtime(group, {.prefetch = PrefetchMode::kOff});
        std::vector<WeightId> weights;
        for (int i = 0; i < 4; ++i)
          weights.push_back(runtime.add({.name = fmt::format("w{}", i), .rows = 64, .columns = 64, .format = format}));
        for (const WeightId w : weights) fill_shard(runtime, w, 1);
        runtime.start();
        const auto values = [&](WeightId w) {
          const FullWeight full = runtime.acquire(w, Phase::kForward, {.expects_backward = false});
          const auto* const at = static_cast<const std::byte*>(full.data());
          return std::vector<std::byte>(at, at + bytes_of(full.dtype(), 64 * 64));
        };
        if (group.rank() == 0) {
          seen.wait();
        } else {
          std::vector<std::vector<std::byte>> before;
          for (const WeightId w : weights) before.push_back(values(w));
          seen.count_down();
          overwritten.wait();
          for (const WeightId w : weights) EXPECT_TRUE(values(w) == before[w]) << format << ' ' << w;
        }
      }
      if (group.rank() == 1) return;
      EXPECT_EQ(collective::Leftovers::of_process().count(), 1U);
      std::vector<SharedBuffer> others;
      for (size_t i = 0; i < 64; ++i) {
        others.push_back(SharedHeap::process().allocate(64 * 32 * (i % 2 == 0 ? 4 : 2)));
        std::memset(others.back().data(), 0xff, others.back().size());
      }
      overwritten.count_down();
    });
    collective::Leftovers::of_process().free_unread();
    EXPECT_EQ(collective::Leftovers::of_process().count(), 0U);
  }
}

TEST(StepTest, BuffersAreReturnedOnOtherThreads) {
  run_ranks(2, [](ShardGroup group) {
    Runtime runtime(group, prefetching());
    std::vector<WeightId> weights;
    for (int i = 0; i < 6; ++i)
      weights.push_back(runtime.add({.name = fmt::format("w{}", i), .rows = 64, .columns = 16}));
    for (const WeightId w : weights) fill_shard(runtime, w, 1);
    runtime.start();
    for (int step = 0; step < 20; ++step) {
      std::vector<std::thread> threads;
      for (const WeightId w : weights)
        threads.emplace_back([full = runtime.acquire(w, Phase::kForward, {.expects_backward = false}), w]() mutable {
          EXPECT_EQ(wrong_elements(full, w, 1), 0);
          full.release();
        });
      for (std::thread& thread : threads) thread.join();
      runtime.update({}, [] {});
    }
    EXPECT_LE(runtime.report().gathered_bytes, 7 * 64 * 16 * 4);
  });
}

TEST(StepTest, AValueThatIsNotFiniteIsAnErrorOnAllRanks) {
  for (const char* format : {"nvfp4", "mxfp8", "fp8_e4m3"})
    run_ranks(2, [&](ShardGroup group) {
      Runtime runtime(group, prefetching());
      const WeightId w = runtime.add({.name = "w", .rows = 64, .columns = 32, .format = format});
      runtime.start();
      const auto spoil = [&] {
        if (group.rank() == 1)
          reinterpret_cast<float*>(runtime.shard(w))[2 * 32 + 5] = std::numeric_limits<float>::infinity();
      };
      const auto told = group.rank() == 1
                            ? HasSubstr("1 values of this rank's rows are not finite, the first in row 34")
                            : HasSubstr("rank 1 (pid");
      runtime.begin_update({{w}});
      spoil();
      EXPECT_THAT(error_of([&] { runtime.end_update(); }), told);
      EXPECT_THAT(error_of([&] { runtime.acquire(w, Phase::kForward); }), HasSubstr("is used inside an update"));
      fill_shard(runtime, w, 0);
      runtime.end_update();
      EXPECT_EQ(runtime.version(w), 2);
      runtime.begin_write({{w}}, "");
      spoil();
      EXPECT_THAT(error_of([&] { runtime.end_write(); }), told);
      runtime.abandon(false);  // instead of good values
      runtime.update({{w}}, [&] { fill_shard(runtime, w, 0); });
      EXPECT_EQ(runtime.version(w), 3);
    });
}

TEST(StepTest, AWriteIsAnExchangeAndNoStep) {
  run_ranks(3, [](ShardGroup group) {
    Runtime runtime(group, prefetching());
    std::vector<WeightId> weights;
    for (int i = 0; i < 4; ++i)
      weights.push_back(runtime.add({.name = fmt::format("w{}", i), .rows = 40, .columns = 4}));
    for (const WeightId w : weights) fill_shard(runtime, w, 1);
    runtime.start();
    for (int version = 1; version < 20; ++version) {
      // Versions follow each other at once, and one rank is slower than the others.
      if (group.rank() == version % 3) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      for (const WeightId w : weights) {
        const FullWeight full = runtime.acquire(w, Phase::kForward);
        EXPECT_EQ(wrong_elements(full, w, version), 0);
      }
      for (const WeightId w : weights) {
        EXPECT_THAT(runtime.begin_write({{w}}, "7", {.what = "fill"}), testing::ElementsAre("7", "7", "7"));
        fill_shard(runtime, w, version + 1);
        runtime.end_write();
      }
    }
    const RuntimeReport report = runtime.report();
    EXPECT_EQ(report.writes, 19 * 4);
    EXPECT_EQ(report.updates, 0);
    EXPECT_EQ(report.drains, 0);
    runtime.next_step();
    runtime.update(weights, [] {});
    EXPECT_EQ(runtime.version(weights[0]), 21);
  });
}

TEST(StepTest, AWriteThatRanksDoNotMakeAlikeDoesNotBegin) {
  run_ranks(2, [](ShardGroup group) {
    Runtime runtime(group, prefetching());
    const WeightId w = runtime.add({.name = "w", .rows = 40, .columns = 4});
    fill_shard(runtime, w, 1);
    runtime.start();
    const FullWeight before = runtime.acquire(w, Phase::kForward);
    EXPECT_THAT(runtime.begin_write({{w}}, group.rank() == 0 ? "a" : "b"), testing::ElementsAre("a", "b"));
    EXPECT_THAT(runtime.begin_write({{w}}, "c", {}, false), testing::ElementsAre("c", "c"));
    EXPECT_THAT(error_of([&] { runtime.end_write(); }), HasSubstr("end_write() without begin_write()"));
    EXPECT_EQ(wrong_elements(runtime.acquire(w, Phase::kForward), w, 1), 0);
    EXPECT_EQ(runtime.version(w), 1);
    // And what is held is not written under its holder.
    runtime.begin_write({{w}}, "", {.what = "fill"});
    EXPECT_THAT(error_of([&] { runtime.begin_write({{w}}, "", {.what = "fill"}); }),
                HasSubstr("has begun and not ended"));
    EXPECT_THAT(error_of([&] { runtime.end_update(); }), HasSubstr("end_update() without begin_update()"));
    EXPECT_THAT(error_of([&] { runtime.acquire(w, Phase::kForward); }), HasSubstr("is used inside an update"));
    fill_shard(runtime, w, 2);
    runtime.end_write();
    EXPECT_EQ(wrong_elements(before, w, 1), 0);
    EXPECT_EQ(wrong_elements(runtime.acquire(w, Phase::kForward), w, 2), 0);
  });
}

TEST(StepTest, AWriteThatARankRefusesIsVoidAndTheNextOneIsRight) {
  std::latch begun(3);
  run_ranks(3, [&](ShardGroup group) {
    Runtime runtime(group, prefetching());
    const WeightId w = runtime.add({.name = "w", .rows = 40, .columns = 4});
    fill_shard(runtime, w, 1);
    runtime.start();
    const auto write = [&] { runtime.begin_write({{w}}, "", {.what = "fill"}); };
    if (group.rank() == 1)
      group.impl()->refuse("fill", Status(ErrorCode::kInvalidArgument, "no values"));
    else
      EXPECT_EQ(error_of(write), "rank 1: no values");
    runtime.abandon();
    write();
    fill_shard(runtime, w, 2);
    begun.arrive_and_wait();
    // One rank is told before it has published.
    if (group.rank() == 2) {
      group.impl()->refuse("fill", Status(ErrorCode::kCancelled, "interrupted"));
    } else {
      runtime.end_write();
      EXPECT_EQ(error_of([&] { runtime.drain(); }), "cancelled: rank 2: interrupted");
    }
    runtime.abandon();
    EXPECT_EQ(runtime.version(w), 2);
    EXPECT_EQ(wrong_elements(runtime.acquire(w, Phase::kForward), w, 2), 0);
    write();
    fill_shard(runtime, w, 3);
    runtime.end_write();
    EXPECT_EQ(wrong_elements(runtime.acquire(w, Phase::kForward), w, 3), 0);
  });
}

TEST(StepTest, AWriteThatARankHasLeftWhileItWaitedIsVoidOnAll) {
  std::latch left(1);
  run_ranks(3, [&](ShardGroup group) {
    Runtime runtime(group, prefetching());
    const WeightId w = runtime.add({.name = "w", .rows = 40, .columns = 4});
    fill_shard(runtime, w, 1);
    runtime.start();
    const auto write = [&] { runtime.begin_write({{w}}, "", {.what = "fill"}); };
    if (group.rank() == 1) {
      struct Stopped {};
      const device::WaitHook hook([](void*) { throw Stopped(); });
      EXPECT_THROW(write(), Stopped);
      left.count_down();
    } else {
      left.wait();
      EXPECT_THAT(error_of(write), HasSubstr("cancelled: rank 1: interrupted in exchange 'fill'"));
    }
    runtime.abandon();
    EXPECT_EQ(runtime.version(w), 1);
    write();
    fill_shard(runtime, w, 2);
    runtime.end_write();
    EXPECT_EQ(wrong_elements(runtime.acquire(w, Phase::kForward), w, 2), 0);
  });
}

TEST(StepTest, RanksThatMeetInAWriteAndAnotherCallAreToldBothNames) {
  run_ranks(2, [](ShardGroup group) {
    RuntimeOptions options = prefetching();
    options.while_waiting = [] {};  // waits for words look for calls, too
    Runtime runtime(group, options);
    const WeightId w = runtime.add({.name = "w", .rows = 40, .columns = 4});
    fill_shard(runtime, w, 1);
    runtime.start();
    const auto meets = [&](const std::string& own) {
      const std::string error = error_of([&] { runtime.begin_write({{w}}, "", {.what = own}); });
      EXPECT_THAT(error, AllOf(HasSubstr("'mul_ of w'"), HasSubstr("'zero_ of w'")));
      runtime.abandon();
    };
    meets(group.rank() == 0 ? "mul_ of w" : "zero_ of w");
    const std::string error = error_of([&] {
      if (group.rank() == 0)
        runtime.begin_write({{w}}, "", {.what = "zero_ of w"});
      else
        runtime.begin_update({{w}}, {.what = "the step of SGD"});
    });
    EXPECT_THAT(error, AllOf(HasSubstr("'zero_ of w'"), HasSubstr("the step of SGD")));
    runtime.abandon();
    runtime.update({{w}}, [&] { fill_shard(runtime, w, 2); });
    EXPECT_EQ(wrong_elements(runtime.acquire(w, Phase::kForward), w, 2), 0);
  });
}

TEST(StepTest, AWriteAmidAForwardLeavesItsGradientsAndPlan) {
  run_ranks(2, [](ShardGroup group) {
    Runtime runtime(group, prefetching());
    const WeightId used = runtime.add({.name = "used", .rows = 40, .columns = 4});
    const WeightId written = runtime.add({.name = "written", .rows = 40, .columns = 4, .format = "bf16"});
    runtime.start();
    for (int step = 0; step < 3; ++step) {
      runtime.acquire(used, Phase::kForward);
      runtime.begin_write({{written}}, "");
      fill_shard(runtime, written, step);
      runtime.end_write();
      runtime.acquire(written, Phase::kForward, {.expects_backward = false});
      produce_ones(runtime, used, 1);
      EXPECT_THAT(runtime.drain(), testing::ElementsAre(Added{.weight = used, .round = 0, .ranks = 2}));
      runtime.update({{used}}, [] {});
    }
    EXPECT_EQ(runtime.version(written), 4);
    EXPECT_GE(runtime.report().prefetched, 2);
  });
}

TEST(StepTest, AWeightIsPublishedAtItsFirstUse) {
  run_ranks(2, [](ShardGroup group) {
    RuntimeOptions options = prefetching();
    options.publish = PublishAt::kFirstUse;
    Runtime runtime(group, options);
    const WeightId w = runtime.add({.name = "w", .rows = 64, .columns = 16, .format = "bf16", .compute = DType::kF32});
    const WeightId in_place = runtime.add({.name = "v", .rows = 64, .columns = 16});
    runtime.start();
    for (int64_t step = 2; step < 6; ++step) {
      runtime.update({{w, in_place}}, [&] {
        fill_shard(runtime, w, step);
        fill_shard(runtime, in_place, step);
      });
      EXPECT_THAT(error_of([&] { runtime.acquire(w, Phase::kForward); }),
                  HasSubstr("was updated and is not published"));
      EXPECT_EQ(wrong_elements(runtime.acquire(w, Phase::kForward, {.first_micro_batch = true}), w, step), 0);
      EXPECT_EQ(wrong_elements(runtime.acquire(in_place, Phase::kForward), in_place, step), 0);
      EXPECT_EQ(wrong_elements(runtime.acquire(w, Phase::kForward, {.micro_batch = 1}), w, step), 0);
      EXPECT_EQ(runtime.version(w), step);
    }
    const float skip = 1;
    runtime.update({{w}}, [&] { fill_shard(runtime, w, 9); });
    runtime.publish({{w}}, &skip);
    EXPECT_EQ(wrong_elements(runtime.acquire(w, Phase::kForward), w, 5), 0);  // the planes stay
    EXPECT_EQ(runtime.version(w), 6);
  });
}

TEST(StepTest, AmaxesAreExchangedTogetherOrOneByOneWithTheSamePlanes) {
  const auto planes = [](bool together) {
    std::vector<float> values;
    run_ranks(2, [&](ShardGroup group) {
      RuntimeOptions options = prefetching();
      options.coalesce_amax = together;
      Runtime runtime(group, options);
      std::vector<WeightId> weights;
      for (const char* format : {"nvfp4", "mxfp8", "nvfp4"})
        weights.push_back(
            runtime.add({.name = fmt::format("w{}", weights.size()), .rows = 64, .columns = 16, .format = format}));
      for (const WeightId w : weights) fill_shard(runtime, w, 3);
      runtime.start();
      EXPECT_EQ(runtime.report().max_exchanges, together ? 1 : 3);
      for (const WeightId w : weights) {
        const FullWeight full = runtime.acquire(w, Phase::kForward);
        const auto* data = static_cast<const float*>(full.data());
        if (group.rank() == 0) values.insert(values.end(), data, data + full.rows() * full.columns());
      }
      group.impl()->barrier("end");
    });
    return values;
  };
  const std::vector<float> found = planes(true);
  EXPECT_EQ(found.size(), 3U * 64 * 16);
  EXPECT_EQ(found, planes(false));
}

TEST(StepTest, StreamsOfAChainAreNamedAndCanBeWaitedFor) {
  run_ranks(2, [](ShardGroup group) {
    RuntimeOptions options = prefetching();
    options.graph_scope = {"attn"};
    options.inline_bytes = 0;
    Runtime runtime(group, options);
    const std::vector<WeightId> weights{
        runtime.add({.name = "layer.self_attention.q", .rows = 64, .columns = 16}),
        runtime.add({.name = "layer.self_attention.k", .rows = 64, .columns = 16}),
    };
    runtime.start();
    EXPECT_TRUE(runtime.streams().empty());
    for (int step = 0; step < 2; ++step) {
      for (const WeightId w : weights) runtime.acquire(w, Phase::kForward, {.expects_backward = false});
      runtime.update(weights, [] {});
    }
    runtime.synchronize("GRAPHED", true);
    runtime.synchronize("", true);
    runtime.synchronize("UNGRAPHED", false);  // which has none
    const std::vector<StreamInfo> streams = runtime.streams();
    ASSERT_EQ(streams.size(), 1U);
    EXPECT_EQ(streams[0].name, "gather-g");
    EXPECT_EQ(streams[0].chain, "GRAPHED");
    EXPECT_TRUE(streams[0].gathers);
    EXPECT_TRUE(streams[0].idle);
    EXPECT_THAT(error_of([&] { runtime.synchronize("graphed", true); }),
                HasSubstr("there is no chain \"graphed\": there are GRAPHED and UNGRAPHED"));
  });
}

TEST(StepTest, GathersArePacedWithPrefetchAndWithout) {
  constexpr int64_t kBytes = 64 * 16 * 4;
  for (const PrefetchMode prefetch : {PrefetchMode::kOff, PrefetchMode::kOn})
    run_ranks(2, [prefetch](ShardGroup group) {
      Runtime runtime(group, {.prefetch = prefetch, .gather_bytes_per_second = kBytes * 100.0});
      const WeightId w = runtime.add({.name = "w", .rows = 64, .columns = 16});
      runtime.start();
      for (int step = 0; step < 2; ++step) {
        const TimePoint began = Clock::steady().now();
        runtime.acquire(w, Phase::kForward, {.expects_backward = false});
        const double took = to_seconds(Clock::steady().now() - began);
        EXPECT_GE(took, step == 0 ? 0.01 : 0);  // a later one may have begun before
        runtime.update({&w, 1}, [] {});
      }
    });
}

TEST(StepTest, RanksThatDisagreeAreToldAboutWhat) {
  run_ranks(2, [](ShardGroup group) {
    Runtime runtime(group, prefetching());
    runtime.add({.name = "w", .rows = 64 + group.rank(), .columns = 16});
    EXPECT_THAT(error_of([&] { runtime.start(); }), StartsWith("mismatch: \"w\" is [6"));
  });
}

TEST(StepTest, AWaitEndsWithTheExceptionOfWhileWaiting) {
  struct Stopped {};
  run_ranks(2, [](ShardGroup group) {
    int wakes = 0;
    RuntimeOptions options = prefetching();
    if (group.rank() == 0)
      options.while_waiting = [&] {
        if (++wakes > 1) throw Stopped();
      };
    Runtime runtime(group, options);
    const WeightId w = runtime.add({.name = "w", .rows = 64, .columns = 16});
    runtime.start();
    wakes = 0;
    if (group.rank() == 0) {
      EXPECT_THROW(runtime.begin_update({{w}}), Stopped);  // the other rank does not come
      group.impl()->fail(Status(ErrorCode::kCancelled, "the first rank gave up"));
    } else {
      const auto word = group.impl()->at_least(0, collective::Word::kPublished, w, 9, "a version");
      EXPECT_THAT(error_of([&] { group.impl()->device().wait_host(*word, group.impl()->deadline()); }),
                  HasSubstr("the first rank gave up"));
    }
  });
}

TEST(StepTest, ALostGroupIsAnErrorAndNotAHang) {
  run_ranks(2, [](ShardGroup group) {
    Runtime runtime(group, prefetching());
    runtime.add({.name = "w", .rows = 64, .columns = 16});
    runtime.start();
    if (group.rank() == 1) {
      group.impl()->fail(Status(ErrorCode::kPeerLost, "rank 1 is gone"));
      return;
    }
    EXPECT_THAT(error_of([&] { runtime.drain(); }), HasSubstr("rank 1 is gone"));
  });
}

TEST(StepTest, AGroupServesOneRuntime) {
  const ShardGroup group = ShardGroup::single(test_group());
  {
    const Runtime first(group);
  }
  EXPECT_THAT(error_of([&] { const Runtime second(group); }), HasSubstr("has served a runtime"));
}

TEST(StepTest, RuntimesCanBeMadeAgainAndAgain) {
  const auto once = [](ShardGroup group) {
    Runtime runtime(group, prefetching());
    const WeightId w = runtime.add({.name = "w", .rows = 40, .columns = 4});
    fill_shard(runtime, w, 1);
    runtime.start();
    EXPECT_EQ(wrong_elements(runtime.acquire(w, Phase::kForward), w, 1), 0);
    produce_ones(runtime, w);
    runtime.drain();
    group.close();
  };
  run_ranks(2, once);
  const size_t fds = open_fds();
  for (int i = 0; i < 1000; ++i) run_ranks(2, once);
  EXPECT_EQ(open_fds(), fds);
}

TEST(StepTest, NothingGrowsOverSteps) {
  run_ranks(2, [](ShardGroup group) {
    Runtime runtime(group, prefetching());
    std::vector<WeightId> weights;
    for (int i = 0; i < 5; ++i)
      weights.push_back(runtime.add({.name = fmt::format("w{}", i), .rows = 48, .columns = 8}));
    runtime.start();
    const RuntimeForecast forecast = runtime.forecast();
    RuntimeReport early;
    for (int step = 0; step < 200; ++step) {
      for (const WeightId w : weights) runtime.acquire(w, Phase::kForward);
      for (size_t i = weights.size(); i-- > 0;) {
        runtime.acquire(weights[i], Phase::kBackward);
        produce_ones(runtime, weights[i]);
      }
      runtime.drain();
      runtime.update(weights, [] {});
      if (step == 0) {
        EXPECT_THAT(runtime.explain(0), HasSubstr("w0.forward (micro-batch 0, 2048 bytes) waited"));
      }
      if (step == 10) early = runtime.report();
    }
    const RuntimeReport late = runtime.report();
    EXPECT_EQ(late.shard_bytes, forecast.parameters);
    EXPECT_EQ(late.gradient_bytes, forecast.gradients);
    EXPECT_EQ(late.gathered_peak_bytes, early.gathered_peak_bytes);
    EXPECT_EQ(late.gathered_peak_bytes, forecast.gathered);
    EXPECT_LE(late.produced_bytes, 5 * 48 * 8 * 4);
    EXPECT_EQ(late.mispredicted, early.mispredicted);
  });
}

TEST(StepTest, ShardsOfAStackAreOneBlockAndItsWeightsAreGatheredAloneOrAsAList) {
  run_ranks(2, [](ShardGroup group) {
    Runtime runtime(group, {.prefetch = PrefetchMode::kOff});
    const std::vector<WeightId> stack = runtime.add_stack({.name = "experts.up", .rows = 40, .columns = 3}, 3);
    ASSERT_EQ(stack.size(), 3U);
    EXPECT_EQ(runtime.spec(stack[2]).name, "experts.up[2]");
    const auto bytes = runtime.rows(stack[0]).size() * 3 * 4;
    for (size_t i = 0; i < stack.size(); ++i) {
      EXPECT_EQ(runtime.shard(stack[i]), runtime.shard(stack[0]) + static_cast<int64_t>(i) * bytes);
      fill_shard(runtime, stack[i], 1);
    }
    runtime.start();
    EXPECT_EQ(wrong_elements(runtime.acquire(stack[1], Phase::kForward), stack[1], 1), 0);
    EXPECT_EQ(runtime.report().bytes_gathered, 40 * 3 * 4);
    const std::vector<FullWeight> all = runtime.acquire(stack, Phase::kForward);
    ASSERT_EQ(all.size(), 1U);
    ASSERT_EQ(all[0].rows(), 3 * 40);
    EXPECT_EQ(all[0].version(), 1);
    EXPECT_EQ(runtime.report().bytes_gathered, 4 * 40 * 3 * 4);
    const auto* element = static_cast<const float*>(all[0].data());
    for (const WeightId expert : stack)
      for (int64_t row = 0; row < 40; ++row)
        for (int64_t column = 0; column < 3; ++column)
          ASSERT_EQ(*element++, weight_value(expert, row, column, 1)) << expert << ", row " << row;
    EXPECT_EQ(runtime.status(stack[2]).expert, 2U);
    EXPECT_THAT(error_of([&] { runtime.add_stack({.name = "one", .rows = 40, .columns = 3}, 1); }),
                HasSubstr("at least two weights"));
  });
}

TEST(StepTest, WhoProducesInAnotherOrderInTheFirstStepWaitsForNobody) {
  run_ranks(2, [](ShardGroup group) {
    const int rank = group.rank();
    Runtime runtime(group, prefetching());
    std::vector<WeightId> order;
    for (int i = 0; i < 8; ++i)
      order.push_back(runtime.add({.name = fmt::format("layers.{}", i), .rows = 64, .columns = 8}));
    runtime.start();
    if (rank == 0) std::ranges::reverse(order);
    for (const WeightId layer : order) produce_ones(runtime, layer);
    EXPECT_EQ(runtime.drain().size(), order.size());
  });
}

TEST(StepTest, ACapCountsWhatItsUserKeeps) {
  run_ranks(2, [](ShardGroup group) {
    constexpr int64_t kBytes = 32 * 8 * 4;
    RuntimeOptions options = prefetching();
    options.cap_bytes = 2 * kBytes;
    Runtime runtime(group, options);
    std::vector<WeightId> layers;
    for (int i = 0; i < 4; ++i)
      layers.push_back(runtime.add({.name = fmt::format("layers.{}", i), .rows = 32, .columns = 8}));
    runtime.start();
    FullWeight kept;  // until the next one is there, so that a prefetch would be the third buffer
    for (int pass = 0; pass < 3; ++pass)
      for (const WeightId layer : layers) kept = runtime.acquire(layer, Phase::kForward, {.expects_backward = false});
    RuntimeReport report = runtime.report();
    EXPECT_EQ(report.gathered_peak_bytes, 2 * kBytes);
    EXPECT_EQ(report.prefetched, 0);
    EXPECT_GT(report.refused, 0);
    EXPECT_EQ(report.over_cap, 0);
    // More at once than the cap allows.
    std::vector<FullWeight> all;
    for (const WeightId layer : layers)
      all.push_back(runtime.acquire(layer, Phase::kForward, {.expects_backward = false}));
    EXPECT_GT(runtime.report().over_cap, 0);
  });
}

TEST(StepTest, AStatusTellsWhatIsUnderWayAndUsedAround) {
  run_ranks(2, [](ShardGroup group) {
    Runtime runtime(group, prefetching());
    const WeightId a = runtime.add({.name = "a", .rows = 32, .columns = 4});
    const WeightId b = runtime.add({.name = "b", .rows = 32, .columns = 4});
    const WeightId e = runtime.add({.name = "e", .rows = 32, .columns = 4});
    runtime.add_experts({{b, e}});
    runtime.start();
    EXPECT_EQ(runtime.status(a).gather, "NONE");
    EXPECT_EQ(runtime.status(a).next, std::nullopt);
    EXPECT_EQ(runtime.status(a).expert, std::nullopt);
    EXPECT_EQ(runtime.status(e).expert, 1U);
    {
      const FullWeight full = runtime.acquire(a, Phase::kForward);
      EXPECT_EQ(runtime.status(a).gather, "DATA_READY_SYNC");
      runtime.acquire(b, Phase::kForward);
    }
    EXPECT_EQ(runtime.status(a).gather, "NONE");
    EXPECT_EQ(runtime.status(a).reduction, "NONE");
    produce_ones(runtime, a);
    EXPECT_NE(runtime.status(a).reduction, "NONE");
    runtime.drain();
    EXPECT_EQ(runtime.status(a).reduction, "NONE");
    runtime.update({{a, b, e}}, [] {});
    EXPECT_EQ(runtime.status(a).next, b);
    EXPECT_EQ(runtime.status(b).prev, a);
  });
}

TEST(StepTest, AFrozenWeightHasNoGradientUntilItThaws) {
  run_ranks(2, [](ShardGroup group) {
    Runtime runtime(group, prefetching());
    const WeightId w = runtime.add({.name = "w", .rows = 32, .columns = 4, .frozen = true});
    runtime.start();
    EXPECT_THAT(error_of([&] { runtime.gradient_buffer(w); }), HasSubstr("\"w\" is frozen"));
    runtime.set_frozen(w, false);
    produce_ones(runtime, w, 2);
    EXPECT_THAT(error_of([&] { runtime.set_frozen(w, true); }), HasSubstr("has a gradient in flight"));
    runtime.drain();
    EXPECT_EQ(*static_cast<float*>(runtime.gradient(w)), 2.0F);
  });
}

TEST(StepTest, ChainsChangeOnlyBeforeTheyArePlanned) {
  Runtime runtime(ShardGroup::single(test_group()), {});
  const WeightId qkv = runtime.add({.name = "layers.0.self_attention.qkv", .rows = 4, .columns = 4});
  runtime.start();
  EXPECT_EQ(runtime.report().weights[0].chain, "UNGRAPHED");
  runtime.classify({"attn"}, false);
  EXPECT_EQ(runtime.report().weights[0].chain, "GRAPHED");
  runtime.add({.name = "layers.1.self_attention.qkv", .rows = 4, .columns = 4});  // by the new scope, too
  EXPECT_EQ(runtime.report().weights[1].chain, "GRAPHED");
  runtime.acquire(qkv, Phase::kForward);
  EXPECT_THAT(error_of([&] { runtime.classify({}, false); }), HasSubstr("layers.0.self_attention.qkv"));
}

}  // namespace
}  // namespace tessera::etp
