// Weights that uses read in their owners' memory: what they show, who keeps it, and which weights those are.
#include "etp/weight_view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fmt/format.h>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "base/testing.h"
#include "collective/group.h"
#include "etp/etp_testing.h"

namespace tessera::etp {
namespace {

constexpr int64_t kAll = 64, kPerRow = 1024;  // 16 rows: 16 pages of 4 KiB
constexpr int64_t kAllBytes = kAll * kPerRow * 4;
const WeightSpec kSpec{.name = "w", .rows = kAll, .columns = kPerRow};

// All rows of a version that this rank's update writes.
void write_version(Runtime& runtime, WeightId w, int64_t version) {
  runtime.update({{w}}, [&] { fill_shard(runtime, w, version); });
}

WeightId added(Runtime& runtime, const WeightSpec& spec = kSpec) {
  const WeightId w = runtime.add(spec);
  fill_shard(runtime, w, 1);
  return w;
}

// As wrong_elements(); all of these values are bf16.
int64_t wrong_halves(const FullWeight& full, WeightId w, int64_t version) {
  const auto* at = static_cast<const uint16_t*>(full.data());
  int64_t wrong = 0;
  for (int64_t row = 0; row < full.rows(); ++row)
    for (int64_t column = 0; column < full.columns(); ++column)
      wrong += std::bit_cast<float>(uint32_t{*at++} << 16) == weight_value(w, row, column, version) ? 0 : 1;
  return wrong;
}

TEST(WeightViewTest, UsesReadWhatTheOwnersPublishedLast) {
  for (const int ranks : {2, 4})
    run_ranks(ranks, [](ShardGroup group) {
      Runtime runtime(group, {.prefetch = PrefetchMode::kOn});
      const std::vector<WeightId> weights{added(runtime), added(runtime, {.name = "v", .rows = 32, .columns = 2048})};
      runtime.start();
      const void* address = nullptr;
      for (int64_t version = 1; version <= 5; ++version) {
        for (const Phase phase : {Phase::kForward, Phase::kBackward})
          for (const WeightId w : weights) {
            const FullWeight full = runtime.acquire(w, phase, {.version = version});
            EXPECT_EQ(full.version(), version);
            EXPECT_EQ(wrong_elements(full, w, version), 0);
            EXPECT_EQ(runtime.status(w).gather, "DATA_READY_SYNC");
            if (w != weights[0]) continue;
            EXPECT_EQ(full.data(), address == nullptr ? full.data() : address);
            address = full.data();
          }
        EXPECT_EQ(runtime.status(weights[0]).gather, "NONE");
        for (const WeightId w : weights) produce_ones(runtime, w);
        runtime.update(weights, [&] {
          for (const WeightId w : weights) fill_shard(runtime, w, version + 1);
        });
      }
      EXPECT_EQ(runtime.status(weights[0]).next, weights[1]);
      const RuntimeReport report = runtime.report();
      EXPECT_EQ(report.mapped, 20);
      EXPECT_EQ(report.consumptions, 20);
      EXPECT_EQ(report.prefetched + report.on_demand + report.bytes_gathered, 0);
      EXPECT_EQ(report.gathered_peak_bytes, 0);
      EXPECT_EQ(report.mapped_bytes, kAllBytes + 32 * 2048 * 4);
      EXPECT_EQ(runtime.forecast().gathered, 0);
    });
}

TEST(WeightViewTest, WhoKeepsOneKeepsItsVersionAndStopsNobody) {
  run_ranks(2, [](ShardGroup group) {
    Runtime runtime(group);
    const WeightId w = added(runtime);
    runtime.start();
    FullWeight first = runtime.acquire(w, Phase::kForward);
    const void* const address = first.data();
    write_version(runtime, w, 2);
    EXPECT_EQ(first.data(), address);
    EXPECT_EQ(wrong_elements(first, w, 1), 0);
    FullWeight second = runtime.acquire(w, Phase::kForward);
    EXPECT_NE(second.data(), address);
    EXPECT_EQ(wrong_elements(second, w, 2), 0);
    EXPECT_EQ(runtime.report().gathered_bytes, kAllBytes);
    EXPECT_EQ(runtime.report().mapped_bytes, kAllBytes);
    write_version(runtime, w, 3);
    EXPECT_EQ(wrong_elements(first, w, 1), 0);
    EXPECT_EQ(wrong_elements(second, w, 2), 0);
    EXPECT_EQ(runtime.report().gathered_bytes, 2 * kAllBytes);
    first.release();
    second.release();
    EXPECT_EQ(runtime.report().gathered_bytes, 0);
    EXPECT_EQ(wrong_elements(runtime.acquire(w, Phase::kForward), w, 3), 0);
  });
}

TEST(WeightViewTest, AnUpdateOfOtherWeightsLeavesItAsItIs) {
  run_ranks(2, [](ShardGroup group) {
    Runtime runtime(group);
    const WeightId w = added(runtime), other = added(runtime, {.name = "v", .rows = kAll, .columns = kPerRow});
    runtime.start();
    const FullWeight kept = runtime.acquire(w, Phase::kForward);
    write_version(runtime, other, 2);
    EXPECT_EQ(runtime.report().gathered_bytes, 0);
    EXPECT_EQ(runtime.acquire(w, Phase::kForward).data(), kept.data());
    EXPECT_EQ(wrong_elements(kept, w, 1), 0);
  });
}

TEST(WeightViewTest, ItOutlivesTheRuntimeTheGroupAndTheOwners) {
  std::vector<FullWeight> kept(2);
  run_ranks(2, [&](ShardGroup group) {
    Runtime runtime(group);
    const WeightId w = added(runtime);
    const std::shared_ptr<void> shard = runtime.shard_keeper(w);
    std::byte* const rows = runtime.shard(w);
    runtime.start();
    kept[static_cast<size_t>(group.rank())] = runtime.acquire(w, Phase::kForward);
    runtime.close();
    group.impl()->barrier("all have closed");
    std::memset(rows, 0, static_cast<size_t>(kAllBytes / 2));  // whoever has rows may write them now
  });
  for (const FullWeight& full : kept) EXPECT_EQ(wrong_elements(full, 0, 1), 0);
  std::thread([&] { kept.clear(); }).join();
}

TEST(WeightViewTest, OtherThreadsMayHaveThemWhileWeightsAreWritten) {
  run_ranks(2, [](ShardGroup group) {
    Runtime runtime(group);
    const WeightId w = added(runtime);
    runtime.start();
    std::vector<std::thread> threads;
    for (int64_t version = 1; version <= 20; ++version) {
      threads.emplace_back([full = runtime.acquire(w, Phase::kForward), w, version]() mutable {
        for (int i = 0; i < 3; ++i) EXPECT_EQ(wrong_elements(full, w, version), 0);
        full.release();
      });
      write_version(runtime, w, version + 1);
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(runtime.report().gathered_bytes, 0);
  });
}

TEST(WeightViewTest, AUseWaitsForOwnersThatHaveNotPublished) {
  std::atomic<bool> waited{false}, acquired{false}, armed{false};
  run_ranks(2, [&](ShardGroup group) {
    RuntimeOptions options;
    options.while_waiting = [&, rank = group.rank()] {
      if (rank == 0 && armed) waited = true;
    };
    Runtime runtime(group, options);
    const WeightId w = added(runtime);
    runtime.start();
    runtime.begin_update({{w}});
    fill_shard(runtime, w, 2);
    if (group.rank() == 1)
      while (!waited && !acquired) std::this_thread::yield();
    runtime.end_update();
    armed = group.rank() == 0 || armed;
    const FullWeight full = runtime.acquire(w, Phase::kForward);
    EXPECT_EQ(wrong_elements(full, w, 2), 0);
    if (group.rank() != 0) return;
    acquired = true;
    EXPECT_TRUE(waited);
    EXPECT_GT(runtime.report().exposed_seconds, 0);
  });
}

TEST(WeightViewTest, AnOwnerThatPublishesWithoutItsPeersIsAnError) {
  run_ranks(2, [](ShardGroup group) {
    Runtime runtime(group);
    const WeightId w = added(runtime);
    runtime.start();
    if (group.rank() == 1) group.impl()->set(collective::Word::kPublished, w, 2);
    group.impl()->barrier("it has said so");
    const std::string error = error_of([&] { runtime.acquire(w, Phase::kForward); });
    EXPECT_THAT(error, testing::HasSubstr("has published version 2 of w, and rank"));
  });
}

TEST(WeightViewTest, ShardsMayBeUnevenOrEmpty) {
  run_ranks(4, [](ShardGroup group) {
    Runtime runtime(group);
    const std::vector<WeightId> weights{added(runtime, {.name = "32, 32, 16, 0", .rows = 80, .columns = kPerRow}),
                                        added(runtime, {.name = "16, 16, 16, 1", .rows = 49, .columns = kPerRow}),
                                        added(runtime, {.name = "16, 5, 0, 0", .rows = 21, .columns = kPerRow})};
    runtime.start();
    for (int64_t version = 1; version <= 2; ++version) {
      for (const WeightId w : weights) {
        EXPECT_TRUE(runtime.is_mapped(w));
        EXPECT_EQ(wrong_elements(runtime.acquire(w, Phase::kForward), w, version), 0);
      }
      runtime.update(weights, [&] {
        for (const WeightId w : weights) fill_shard(runtime, w, version + 1);
      });
    }
  });
}

TEST(WeightViewTest, ReplicasReadTheirOwnOwners) {
  run_ranks(4, [](ShardGroup group) {
    Runtime runtime(group, {.replicas = 2});
    const WeightId w = added(runtime);
    runtime.start();
    EXPECT_TRUE(runtime.is_mapped(w));
    // What cannot be in a run: it tells the replicas apart.
    const int64_t version = 10 + group.rank() / 2;
    write_version(runtime, w, version);
    EXPECT_EQ(wrong_elements(runtime.acquire(w, Phase::kForward), w, version), 0);
  });
}

TEST(WeightViewTest, OthersAreCopied) {
  const auto mapped = [](int ranks, const RuntimeOptions& options, const WeightSpec& spec = kSpec) {
    std::atomic<int> found = 0;
    run_ranks(ranks, [&](ShardGroup group) {
      Runtime runtime(group, options);
      const WeightId w = added(runtime, spec);
      runtime.start();
      const FullWeight full = runtime.acquire(w, Phase::kForward);
      if (spec.format != "nvfp4") {
        EXPECT_EQ(wrong_elements(full, w, 1), 0);
      }
      found += runtime.is_mapped(w) ? 1 : 0;
      EXPECT_EQ(runtime.report().mapped, runtime.is_mapped(w) ? 1 : 0);
      EXPECT_EQ(runtime.report().bytes_gathered > 0, !runtime.is_mapped(w) && ranks > 1);
    });
    EXPECT_TRUE(found == 0 || found == ranks);
    return found > 0;
  };
  const auto spec = [](auto change) {
    WeightSpec changed = kSpec;
    change(changed);
    return changed;
  };
  EXPECT_TRUE(mapped(2, {}));
  EXPECT_FALSE(mapped(1, {}));
  EXPECT_FALSE(mapped(2, {.map_weights = false}));
  EXPECT_FALSE(mapped(2, {.check = true}));
  EXPECT_FALSE(mapped(2, {.gather_bytes_per_second = 1e12}));
  EXPECT_FALSE(mapped(2, {.inline_bytes = kAllBytes}));
  EXPECT_TRUE(mapped(2, {.inline_bytes = kAllBytes - 1}));
  EXPECT_FALSE(mapped(2, {}, spec([](WeightSpec& s) { s.copied = true; })));
  EXPECT_FALSE(mapped(2, {}, spec([](WeightSpec& s) { s.columns = 1020; })));
  EXPECT_FALSE(mapped(2, {}, spec([](WeightSpec& s) {
                        s.format = "bf16";
                        s.compute = DType::kF32;
                      })));
  EXPECT_FALSE(mapped(2, {}, spec([](WeightSpec& s) { s.format = "nvfp4"; })));
}

TEST(WeightViewTest, PublishedPlanesAreMappedWhereTheyAreComputedWith) {
  for (const PublishAt publish : {PublishAt::kUpdate, PublishAt::kFirstUse})
    for (const int ranks : {1, 2})
      run_ranks(ranks, [&](ShardGroup group) {
        Runtime runtime(group, {.publish = publish});
        WeightSpec spec = kSpec;
        spec.format = "bf16";
        const WeightId w = added(runtime, spec);
        runtime.start();
        EXPECT_TRUE(runtime.is_mapped(w));
        FullWeight kept;
        for (int64_t version = 1; version <= 3; ++version) {
          FullWeight full = runtime.acquire(w, Phase::kForward, {.first_micro_batch = true});
          ASSERT_EQ(full.dtype(), DType::kBF16);
          EXPECT_EQ(wrong_halves(full, w, version), 0);
          if (kept) {
            EXPECT_EQ(wrong_halves(kept, w, version - 1), 0);
          }
          kept = std::move(full);
          write_version(runtime, w, version + 1);
        }
        EXPECT_EQ(runtime.report().mapped, 3);
      });
}

TEST(WeightViewTest, ListsOfExpertsAreCopiedAndOneExpertIsNot) {
  run_ranks(2, [](ShardGroup group) {
    Runtime runtime(group);
    const std::vector<WeightId> stack = runtime.add_stack({.name = "e", .rows = kAll, .columns = kPerRow}, 3);
    for (const WeightId w : stack) fill_shard(runtime, w, 1);
    runtime.start();
    const std::vector<FullWeight> all = runtime.acquire(stack, Phase::kForward);
    ASSERT_EQ(all.size(), 1U);
    EXPECT_EQ(runtime.report().gathered_bytes, 3 * kAllBytes);
    EXPECT_EQ(runtime.report().mapped, 0);
    EXPECT_EQ(wrong_elements(runtime.acquire(stack[1], Phase::kForward), stack[1], 1), 0);
    EXPECT_EQ(runtime.report().mapped, 1);
  });
}

TEST(WeightViewTest, ItIsMappedBesideWeightsThatArePrefetched) {
  run_ranks(2, [](ShardGroup group) {
    Runtime runtime(group, {.prefetch = PrefetchMode::kOn});
    std::vector<WeightId> weights;
    for (int i = 0; i < 6; ++i)
      weights.push_back(
          added(runtime, {.name = fmt::format("w{}", i), .rows = kAll, .columns = kPerRow, .copied = i % 2 == 1}));
    runtime.start();
    for (int64_t version = 1; version <= 3; ++version) {
      for (const WeightId w : weights) EXPECT_EQ(wrong_elements(runtime.acquire(w, Phase::kForward), w, version), 0);
      for (const WeightId w : weights) produce_ones(runtime, w);
      runtime.update(weights, [&] {
        for (const WeightId w : weights) fill_shard(runtime, w, version + 1);
      });
    }
    const RuntimeReport report = runtime.report();
    EXPECT_EQ(report.mapped, 9);
    EXPECT_EQ(report.on_demand, 3);
    EXPECT_EQ(report.prefetched, 6);
    EXPECT_EQ(report.gathered_peak_bytes, kAllBytes);
    EXPECT_EQ(runtime.forecast().gathered, kAllBytes);
  });
}

}  // namespace
}  // namespace tessera::etp
