// Parts of a step that are recorded once and replayed: on virtual ranks, with all that they touch checked, and on
// threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <thread>
#include <vector>

#include "base/testing.h"
#include "etp/capture/capture_testing.h"

namespace tessera::etp {
namespace {

using testing::HasSubstr;

TEST(CaptureTest, AForwardIsReplayedWithTheVersionOfNow) {
  for (const bool async : {false, true})
    for (uint64_t schedule = 0; schedule < 20; ++schedule)
      run_checked(2, schedule, [&](const ShardGroup& group) {
        CapturedModel model(group, graphed(), 2, async);
        CapturedStep forward = model.runtime.capture([&] { model.forward(); });
        EXPECT_EQ(forward.operations(), 2u);
        model.synchronize();
        EXPECT_EQ(model.uses, 0);
        for (int64_t version = 2; version < 6; ++version) {
          forward.replay();
          if (version == 4) forward.replay(1);
          model.update(version);
        }
        model.synchronize();
        EXPECT_EQ(model.uses, 2 * 5);
        EXPECT_EQ(model.wrong, 0);
        const RuntimeReport report = model.runtime.report();
        EXPECT_EQ(report.replays, 5);
        EXPECT_EQ(report.consumptions, 2 * 5);
        EXPECT_EQ(report.prefetched, 2 * 5);
        EXPECT_EQ(report.on_demand, 0);
        EXPECT_EQ(report.captured_bytes, 2 * kBuffer);
      });
}

TEST(CaptureTest, ABackwardAddsToTheRoundsOfNow) {
  for (const bool async : {false, true})
    for (uint64_t schedule = 0; schedule < 20; ++schedule)
      run_checked(3, schedule, [&](const ShardGroup& group) {
        CapturedModel model(group, graphed(), 3, async);
        CapturedStep forward, backward;
        std::vector<float> captured, expected;
        for (const bool replayed : {false, true}) {
          model.runtime.zero_gradients();
          model.gradients = 0;
          for (int interval = 0; interval < 2; ++interval) {
            for (int mb = 0; mb < 6; ++mb) {  // more rounds than a page shows
              if (!replayed || mb == 4) {
                model.forward();
                model.backward();
                continue;
              }
              if (!forward) forward = model.runtime.capture([&] { model.forward(); });
              if (!backward) backward = model.runtime.capture([&] { model.backward(); });
              forward.replay();
              backward.replay();
            }
            model.runtime.drain();
          }
          (replayed ? captured : expected) = model.gradient(1);
        }
        EXPECT_EQ(captured, expected);
        EXPECT_EQ(model.wrong, 0);
        EXPECT_EQ(model.runtime.report().rounds, 2 * 2 * 6 * 3);
        EXPECT_EQ(model.runtime.report().replays, 2 * 2 * 5);
      });
}

// A tied weight: its gradients are summed, those of replays, too.
TEST(CaptureTest, WhatSeveralUsesGiveIsOneRound) {
  for (uint64_t schedule = 0; schedule < 10; ++schedule)
    run_checked(2, schedule, [&](const ShardGroup& group) {
      CapturedModel model(group, graphed(), 1, true);
      const WeightId w = model.ids[0];
      CapturedStep step = model.runtime.capture([&] {
        model.use(w, Phase::kForward);
        model.use(w, Phase::kForward);
        model.produce(w);
        model.produce(w);
      });
      for (int mb = 0; mb < 2; ++mb) {
        model.use(w, Phase::kForward, mb);  // a third use, outside
        step.replay(mb);
        model.produce(w, mb);
      }
      EXPECT_EQ(model.runtime.drain().size(), 2u);
      EXPECT_THAT(model.gradient(0), testing::Each(1.0F + 2 + 3 + 4 + 5 + 6));
    });
}

// Ranks replay different captures in different orders, and more often than others.
TEST(CaptureTest, RanksNeedNotReplayAlike) {
  for (const bool async : {false, true})
    for (uint64_t schedule = 0; schedule < 20; ++schedule)
      run_checked(2, schedule, [&](const ShardGroup& group) {
        CapturedModel model(group, graphed(), 2, async);
        std::vector<CapturedStep> steps;
        for (const WeightId w : model.ids)
          steps.push_back(model.runtime.capture([&] {
            model.use(w, Phase::kForward);
            model.use(w, Phase::kBackward);
            model.produce(w);
          }));
        const std::vector<size_t> order =
            group.rank() == 0 ? std::vector<size_t>{0, 0, 0, 0, 0, 0, 1, 1} : std::vector<size_t>{1, 1, 1, 1, 1, 1, 0};
        for (int64_t version = 2; version < 4; ++version) {
          model.gradients = 0;
          model.runtime.zero_gradients();
          for (const size_t i : order) steps[i].replay();
          model.runtime.drain();
          EXPECT_THAT(model.gradient(0), testing::Each((1.0F + 2 + 3 + 4 + 5 + 6 + 7) / 2));
          EXPECT_THAT(model.gradient(1), testing::Each((7.0F + 8 + 1 + 2 + 3 + 4 + 5 + 6) / 2));
          model.update(version);
        }
        EXPECT_EQ(model.wrong, 0);
      });
}

TEST(CaptureTest, WorksOnThreads) {
  for (const bool async : {false, true})
    run_ranks(3, [&](const ShardGroup& group) {
      CapturedModel model(group, graphed(), 6, async);
      CapturedStep forward = model.runtime.capture([&] { model.forward(); });
      CapturedStep backward = model.runtime.capture([&] { model.backward(); });
      for (int64_t version = 2; version < 40; ++version) {
        model.gradients = 0;
        model.runtime.zero_gradients();
        for (int mb = 0; mb < 3; ++mb) {
          forward.replay(mb);
          backward.replay(mb);
        }
        model.runtime.drain();
        // The last layer's gradients are the first: 1, 7 and 13 of each rank.
        EXPECT_THAT(model.gradient(5), testing::Each(1.0F / 3 + 1.0F / 3 + 1.0F / 3 + 7.0F / 3 + 7.0F / 3 + 7.0F / 3 +
                                                     13.0F / 3 + 13.0F / 3 + 13.0F / 3));
        model.update(version);
      }
      EXPECT_EQ(model.wrong, 0);
      EXPECT_EQ(model.runtime.report().captured_bytes, 2 * 48 * kWide * 4 + kElements * 4);
      group.impl()->barrier("the end");
    });
}

// What was acquired before a capture is released inside, on another thread.
TEST(CaptureTest, WhatComesFromOutsideMayBeReleasedInside) {
  for (const bool async : {false, true})
    run_ranks(2, [&](const ShardGroup& group) {
      CapturedModel model(group, graphed(), 2, async);
      FullWeight outside = model.runtime.acquire(model.ids[0], Phase::kForward);
      CapturedStep step = model.runtime.capture([&] {
        model.use(model.ids[1], Phase::kForward);
        std::thread([full = std::move(outside)] {}).join();
      });
      for (int64_t version = 2; version < 5; ++version) {
        step.replay();
        model.forward();
        model.update(version);
      }
      EXPECT_EQ(model.wrong, 0);
    });
}

// The plan of other uses is not followed where replays have taken their place.
TEST(CaptureTest, NothingIsGatheredInVainForWhatIsReplayed) {
  run_ranks(2, [](const ShardGroup& group) {
    CapturedModel model(group, graphed(), 3, true);
    for (int64_t version = 2; version < 4; ++version) {
      model.forward();
      model.update(version);
    }
    CapturedStep forward = model.runtime.capture([&] { model.forward(); });
    for (int64_t version = 4; version < 10; ++version) {
      forward.replay();
      model.update(version);
    }
    EXPECT_EQ(model.runtime.report().mispredicted, 1);
    EXPECT_EQ(model.wrong, 0);
  });
}

TEST(CaptureTest, DistanceAndCapBoundWhatIsGatheredAhead) {
  for (const int distance : {0, 1, 3})
    for (const bool capped : {false, true})
      run_ranks(2, [&](const ShardGroup& group) {
        RuntimeOptions options = graphed();
        options.distance = distance;
        if (capped) options.cap_bytes = kBuffer;
        CapturedModel model(group, options, 6, false);
        CapturedStep forward = model.runtime.capture([&] { model.forward(); });
        forward.replay();
        const int buffers = capped ? 1 : distance + 1;
        const RuntimeReport report = model.runtime.report();
        EXPECT_EQ(report.captured_bytes, buffers * kBuffer);
        EXPECT_EQ(report.prefetched, distance == 0 ? 0 : 6);
        EXPECT_EQ(report.on_demand, distance == 0 ? 6 : 0);
        EXPECT_EQ(model.wrong, 0);
        group.impl()->barrier("the end");
      });
}

TEST(CaptureTest, BelowACapCapturesTakeThePlaceOfWhatIsGatheredAhead) {
  run_ranks(2, [](const ShardGroup& group) {
    RuntimeOptions options = graphed();
    options.distance = 1;
    options.cap_bytes = 2 * kBuffer;
    CapturedModel model(group, options, 4, false);
    model.forward();
    model.update(2);  // the first use of the next step is gathered ahead
    const auto captured = [&](std::set<const void*>& addresses) {
      return model.runtime.capture([&] {
        model.forward();
        for (const WeightId w : model.ids) addresses.insert(model.runtime.acquire(w, Phase::kForward).data());
      });
    };
    std::set<const void*> first, second;
    CapturedStep one = captured(first);
    EXPECT_EQ(first.size(), 2u);
    CapturedStep two = captured(second);
    EXPECT_EQ(second, first);
    for (int64_t version = 3; version < 6; ++version) {
      one.replay();
      two.replay();
      model.update(version);
    }
    RuntimeReport report = model.runtime.report();
    EXPECT_EQ(report.captured_bytes, 2 * kBuffer);
    EXPECT_EQ(report.gathered_peak_bytes, 2 * kBuffer);
    EXPECT_EQ(report.over_cap, 0);
    // Uses outside take more than the cap, and nothing is gathered ahead for them.
    const int64_t prefetched = report.prefetched;
    model.forward();
    report = model.runtime.report();
    EXPECT_EQ(report.gathered_peak_bytes, 3 * kBuffer);
    EXPECT_EQ(report.prefetched, prefetched);
    EXPECT_GT(report.over_cap, 0);
    EXPECT_EQ(model.wrong, 0);
    group.impl()->barrier("the end");
  });
}

// All of it in one buffer, and its experts one by one, with updates in between.
TEST(CaptureTest, AStackIsReplayedAsAListAndByExpert) {
  for (const int ranks : {1, 2})
    for (const bool async : {false, true})
      for (uint64_t schedule = 0; schedule < 10; ++schedule)
        run_checked(ranks, schedule, [&](const ShardGroup& group) {
          CapturedModel model(group, graphed(), 1, async);
          Runtime& runtime = model.runtime;
          const std::vector<WeightId> stack =
              runtime.add_stack({.name = "layers.9.self_attention.experts", .rows = kLong, .columns = kWide}, 3);
          const auto fill = [&] {
            for (const WeightId expert : stack) fill_shard(runtime, expert, model.version);
          };
          fill();
          runtime.start();
          const auto use_all = [&](Phase phase) {
            std::vector<FullWeight> all = runtime.acquire(stack, phase);
            ASSERT_EQ(all.size(), 1U);
            const auto* data = static_cast<const float*>(all[0].data());
            model.compute->enqueue(
                {.name = "use",
                 .subject = "model",
                 .accesses = {device::read_of(data, 3 * kElements * sizeof(float))},
                 .body = [&model, &stack, data] {
                   ++model.uses;
                   for (size_t i = 0; i < 3 * kElements; ++i) {
                     const auto at = static_cast<int64_t>(i % kElements);
                     model.wrong +=
                         data[i] == weight_value(stack[i / kElements], at / kWide, at % kWide, model.version) ? 0 : 1;
                   }
                 }});
          };
          CapturedStep step = runtime.capture([&] {
            use_all(Phase::kForward);
            model.use(stack[1], Phase::kForward);
            use_all(Phase::kBackward);
          });
          for (int64_t version = 2; version < 5; ++version) {
            step.replay();
            use_all(Phase::kForward);
            model.use(stack[2], Phase::kForward);
            model.synchronize();
            runtime.update(stack, [&] {
              model.version = version;
              fill();
            });
          }
          model.synchronize();
          EXPECT_EQ(model.uses, 3 * 5);
          EXPECT_EQ(model.wrong, 0);
        });
}

TEST(CaptureTest, OneRankReplaysWithItsShardItself) {
  CapturedStep step;
  {
    CapturedModel model(ShardGroup::single(test_group()), graphed(), 2, true);
    step = model.runtime.capture([&] {
      model.forward();
      model.backward();
    });
    for (int64_t version = 2; version < 5; ++version) {
      step.replay();
      model.update(version);
    }
    EXPECT_EQ(model.wrong, 0);
    EXPECT_EQ(model.uses, 3 * 4);
    EXPECT_EQ(model.runtime.report().in_place, 3 * 4);
    EXPECT_THAT(model.gradient(1), testing::Each(1.0F + 3 + 5));
  }
  EXPECT_THAT(error_of([&] { step.replay(); }), HasSubstr("there is nothing to replay"));
}

}  // namespace
}  // namespace tessera::etp
