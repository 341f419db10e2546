// Parts of a step that are recorded once and replayed: on virtual ranks, with all that they touch checked, and on
// threads.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <new>
#include <numeric>
#include <thread>
#include <vector>

#include "base/testing.h"
#include "collective/bootstrap.h"
#include "collective/group.h"
#include "device/record/check.h"
#include "device/record/sinks.h"
#include "device/stream.h"
#include "device/virtual/virtual_world.h"
#include "etp/etp_testing.h"

namespace tessera::etp {
namespace {

using testing::HasSubstr;

constexpr int64_t kLong = 40;  // [F, K]
constexpr int64_t kWide = 8;
constexpr size_t kElements = kLong * kWide;
constexpr int64_t kBuffer = 64 * kWide * 4;  // with the padding of two ranks

RuntimeOptions graphed() {
  RuntimeOptions options = prefetching();
  options.graph_scope = {"attn"};
  return options;
}

// A runtime with graphed weights, and what is computed on its stream.
struct Model {
  Model(const ShardGroup& group, RuntimeOptions options, int weights, bool async)
      : compute(async ? group.impl()->device().make_stream({.name = "compute"}) : group.impl()->device().caller()),
        runtime(group, [&] {
          options.compute = compute;
          return options;
        }()) {
    for (int i = 0; i < weights; ++i)
      ids.push_back(
          runtime.add({.name = fmt::format("layers.{}.self_attention.qkv", i), .rows = kLong, .columns = kWide}));
    other = runtime.add({.name = "head", .rows = kLong, .columns = kWide});
    for (const WeightId w : ids) fill_shard(runtime, w, 1);
    runtime.start();
  }

  // Counts the elements that are not those of `version` when it runs.
  void use(WeightId weight, Phase phase, int micro_batch = 0) {
    const FullWeight full = runtime.acquire(weight, phase, {.micro_batch = micro_batch});
    const auto* data = static_cast<const float*>(full.data());
    compute->enqueue({.name = "use",
                      .subject = "model",
                      .accesses = {device::read_of(data, kElements * sizeof(float))},
                      .body = [this, data, weight] {
                        ++uses;
                        for (size_t i = 0; i < kElements; ++i)
                          wrong += data[i] == weight_value(weight, static_cast<int64_t>(i) / kWide,
                                                           static_cast<int64_t>(i) % kWide, version)
                                       ? 0
                                       : 1;
                      }});
  }
  // A gradient whose elements are the number of gradients so far, when it runs.
  void produce(WeightId weight, int micro_batch = 0) {
    GradientBuffer gradient = runtime.gradient_buffer(weight, micro_batch);
    auto* const data = static_cast<float*>(gradient.data());
    compute->enqueue({.name = "wgrad",
                      .subject = "model",
                      .accesses = {device::write_of(data, kElements * sizeof(float))},
                      .body = [this, data] { std::fill_n(data, kElements, static_cast<float>(++gradients)); }});
    runtime.produce(std::move(gradient));
  }
  void forward() {
    for (const WeightId w : ids) use(w, Phase::kForward);
  }
  void backward() {
    for (size_t i = ids.size(); i-- > 0;) {
      use(ids[i], Phase::kBackward);
      produce(ids[i]);
    }
  }
  void update(int64_t next) {
    runtime.update(ids, [&] {
      version = next;
      for (const WeightId w : ids) fill_shard(runtime, w, next);
    });
  }
  void synchronize() { compute->synchronize(Deadline::after(seconds(60))); }
  std::vector<float> gradient(size_t i) {
    const auto* rows = static_cast<const float*>(runtime.gradient(ids[i]));
    return {rows, rows + runtime.rows(ids[i]).size() * kWide};
  }

  std::shared_ptr<device::Stream> compute;
  Runtime runtime;
  std::vector<WeightId> ids{};
  WeightId other = 0;
  int64_t version = 1;
  int64_t wrong = 0;
  int uses = 0;
  int gradients = 0;
};

// Runs the ranks as fibers, records their schedules and expects that nothing is left unordered in them.
void run_checked(int ranks, uint64_t schedule, const std::function<void(const ShardGroup& group)>& body) {
  const device::Order orders[] = {device::Order::kLatestFirst, device::Order::kEarliestFirst};
  device::VirtualWorld world(schedule, schedule < 2 ? orders[schedule] : device::Order::kRandom);
  std::vector<device::RankLog> logs;
  for (int rank = 0; rank < ranks; ++rank) logs.emplace_back(device::LogHead{.run = 1, .rank = rank, .ranks = ranks});
  for (int rank = 0; rank < ranks; ++rank)
    world.device(rank).recorder().start(device::sink_to(logs[static_cast<size_t>(rank)]));
  collective::InProcessExchange exchange(ranks);
  world.run(ranks, [&](int rank) {
    device::Device& device = world.device(rank);
    ShardGroup group(
        collective::Group::form(exchange.of_rank(rank, device, seconds(60)),
                                {.rank = rank, .size = ranks, .device = &device, .slots = 16, .in_process = true}));
    body(group);
    group.close();
  });
  for (int rank = 0; rank < ranks; ++rank) world.device(rank).recorder().stop();
  const device::CheckReport report = device::check_schedule(logs);
  EXPECT_TRUE(report.ok()) << (report.conflicts.empty() ? std::string() : report.conflicts.front().to_string())
                           << testing::PrintToString(report.faults) << testing::PrintToString(report.unfinished);
  EXPECT_GT(report.accesses, 0u);
}

TEST(CaptureTest, AForwardIsReplayedWithTheVersionOfNow) {
  for (const bool async : {false, true})
    for (uint64_t schedule = 0; schedule < 20; ++schedule)
      run_checked(2, schedule, [&](const ShardGroup& group) {
        Model model(group, graphed(), 2, async);
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
        Model model(group, graphed(), 3, async);
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
      Model model(group, graphed(), 1, true);
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
        Model model(group, graphed(), 2, async);
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
      Model model(group, graphed(), 6, async);
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

TEST(CaptureTest, AddressesAreKeptForCapturesWhileOneLives) {
  run_ranks(2, [](const ShardGroup& group) {
    RuntimeOptions options = graphed();
    options.prefetch = PrefetchMode::kOff;
    Model model(group, options, 2, false);
    const auto address_of = [&](WeightId w) { return model.runtime.acquire(w, Phase::kForward).data(); };
    const void* first = nullptr;
    const void* second = nullptr;
    CapturedStep one = model.runtime.capture([&] { first = address_of(model.ids[0]); });
    CapturedStep two = model.runtime.capture([&] { second = address_of(model.ids[1]); });
    EXPECT_EQ(first, second);  // replays run one after the other
    const FullWeight outside = model.runtime.acquire(model.ids[0], Phase::kForward);
    EXPECT_NE(outside.data(), first);
    EXPECT_NE(address_of(model.ids[1]), first);
    one.replay();
    two.replay();
    EXPECT_EQ(wrong_elements(outside, model.ids[0], 1), 0);
    model.runtime.update({}, [] {});
    model.runtime.update({}, [] {});
    EXPECT_EQ(model.runtime.report().captured_bytes, kBuffer);
    one = {};
    two = {};
    EXPECT_EQ(model.runtime.report().captured_bytes, 0);
    const FullWeight again = model.runtime.acquire(model.ids[1], Phase::kForward);
    EXPECT_NE(again.data(), outside.data());
    group.impl()->barrier("the end");
  });
}

TEST(CaptureTest, RefusesWhatAReplayCouldNotRepeat) {
  run_ranks(2, [](const ShardGroup& group) {
    RuntimeOptions options = graphed();
    options.publish = PublishAt::kFirstUse;
    Model model(group, options, 2, false);
    Runtime& runtime = model.runtime;
    const WeightId w = model.ids[0];
    const auto captured = [&](const std::function<void()>& part) { return error_of([&] { runtime.capture(part); }); };
    EXPECT_THAT(captured([&] { runtime.drain(); }), HasSubstr("drain() cannot be part of a capture"));
    EXPECT_THAT(captured([&] { runtime.begin_update({{w}}); }), HasSubstr("begin_update() cannot be part"));
    EXPECT_THAT(captured([&] { runtime.publish({{w}}); }), HasSubstr("publish() cannot be part"));
    EXPECT_THAT(captured([&] { runtime.capture([] {}); }), HasSubstr("capture() cannot be part"));
    EXPECT_THAT(captured([&] { runtime.acquire(model.other, Phase::kForward); }),
                HasSubstr("\"head\" is of the UNGRAPHED chain"));
    EXPECT_THAT(captured([&] { runtime.acquire(w, Phase::kForward, {.first_micro_batch = true}); }),
                HasSubstr("has another first micro-batch in each replay"));
    EXPECT_THAT(captured([&] { runtime.acquire(w, Phase::kBackward, {.version = 1}); }),
                HasSubstr("has another version in each replay"));
    GradientBuffer outside = runtime.gradient_buffer(w);
    EXPECT_THAT(captured([&] { runtime.produce(std::move(outside)); }), HasSubstr("has not given inside of it"));
    GradientBuffer inside;
    CapturedStep kept = runtime.capture([&] { inside = runtime.gradient_buffer(w); });
    EXPECT_THAT(error_of([&] { runtime.produce(std::move(inside)); }), HasSubstr("has not given"));
    EXPECT_THAT(captured([&] { kept.replay(); }), HasSubstr("replay() cannot be part"));
    EXPECT_THAT(error_of([&] { runtime.classify({}, false); }), HasSubstr("while 1 captures of them live"));
    EXPECT_THAT(error_of([&] { CapturedStep().replay(); }), HasSubstr("there is nothing to replay"));

    CapturedStep step = runtime.capture([&] {
      model.use(w, Phase::kForward);
      model.produce(w);
    });
    runtime.begin_update({{w}});
    EXPECT_THAT(error_of([&] { step.replay(); }), HasSubstr("replayed inside an update"));
    EXPECT_THAT(captured([] {}), HasSubstr("a capture begins inside an update"));
    runtime.end_update();
    runtime.set_frozen(w, true);
    EXPECT_THAT(error_of([&] { step.replay(); }), HasSubstr("was frozen after it was captured"));
    runtime.close();
    EXPECT_THAT(error_of([&] { step.replay(); }), HasSubstr("the runtime is closed"));
  });
}

TEST(CaptureTest, AReplayWaitsForNoFirstUse) {
  run_ranks(2, [](const ShardGroup& group) {
    RuntimeOptions options = graphed();
    options.publish = PublishAt::kFirstUse;
    Model model(group, options, 0, false);
    const WeightId w = model.runtime.add({.name = "layers.0.self_attention.qkv",
                                          .rows = kLong,
                                          .columns = kWide,
                                          .format = "bf16",
                                          .compute = DType::kF32});
    fill_shard(model.runtime, w, 1);
    model.runtime.start();
    CapturedStep step = model.runtime.capture([&] { model.use(w, Phase::kForward); });
    step.replay();
    model.ids = {w};
    model.update(2);
    EXPECT_THAT(error_of([&] { step.replay(); }), HasSubstr("publish() it before a capture that uses it is replayed"));
    model.runtime.publish({{w}});
    step.replay();
    EXPECT_EQ(model.uses, 2);
    EXPECT_EQ(model.wrong, 0);
  });
}

TEST(CaptureTest, ACaptureThatThrowsLeavesNothing) {
  run_ranks(2, [](const ShardGroup& group) {
    Model model(group, graphed(), 2, true);
    FullWeight kept;
    EXPECT_THROW(model.runtime.capture([&] {
      model.use(model.ids[0], Phase::kForward);
      model.produce(model.ids[0]);
      kept = model.runtime.acquire(model.ids[1], Phase::kForward);
      throw std::runtime_error("no");
    }),
                 std::runtime_error);
    EXPECT_THAT(
        error_of([&] { model.runtime.capture([&] { kept = model.runtime.acquire(model.ids[1], Phase::kForward); }); }),
        HasSubstr("layers.1.self_attention.qkv\" is still held when its capture ends"));
    model.runtime.update({}, [] {});
    model.runtime.update({}, [] {});
    EXPECT_EQ(model.runtime.report().captured_bytes, 0);
    kept.release();
    CapturedStep step = model.runtime.capture([&] { model.forward(); });
    step.replay();
    model.forward();
    model.synchronize();
    EXPECT_EQ(model.uses, 4);
    EXPECT_EQ(model.wrong, 0);
    group.impl()->barrier("the end");
  });
}

// What was acquired before a capture is released inside, on another thread.
TEST(CaptureTest, WhatComesFromOutsideMayBeReleasedInside) {
  for (const bool async : {false, true})
    run_ranks(2, [&](const ShardGroup& group) {
      Model model(group, graphed(), 2, async);
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

TEST(CaptureTest, APeerThatIsLostEndsAReplay) {
  for (const bool async : {false, true})
    run_ranks(2, [&](const ShardGroup& group) {
      Model model(group, graphed(), 3, async);
      CapturedStep step = model.runtime.capture([&] {
        model.forward();
        model.backward();
      });
      step.replay();
      model.runtime.drain();
      if (group.rank() == 1) {
        group.impl()->fail(Status(ErrorCode::kPeerLost, "rank 1 is gone"));
        return;
      }
      EXPECT_THAT(error_of([&] {
                    for (;;) {
                      step.replay();
                      model.synchronize();
                      model.runtime.drain();
                    }
                  }),
                  HasSubstr("rank 1 is gone"));
      EXPECT_THAT(error_of([&] {
                    step.replay();
                    model.synchronize();
                  }),
                  HasSubstr("rank 1 is gone"));
    });
}

// A replay that is interrupted while it waits can be repeated.
TEST(CaptureTest, AReplayMayBeRepeatedAfterAnError) {
  struct Stopped {};
  run_ranks(2, [](const ShardGroup& group) {
    RuntimeOptions options = graphed();
    bool stop = false;
    options.while_waiting = [&] {
      if (stop) throw Stopped();
    };
    Model model(group, options, 3, false);
    CapturedStep forward = model.runtime.capture([&] { model.forward(); });
    forward.replay();
    if (group.rank() == 0) {
      model.update(2);
      stop = true;
      // The other rank publishes its rows after this.
      EXPECT_THROW(forward.replay(), Stopped);
      stop = false;
    } else {
      model.runtime.begin_update(model.ids);
      model.version = 2;
      for (const WeightId w : model.ids) fill_shard(model.runtime, w, 2);
    }
    group.impl()->exchange("interrupted", {});
    if (group.rank() == 1) model.runtime.end_update();
    model.uses = 0;
    forward.replay();
    EXPECT_EQ(model.uses, 3);
    EXPECT_EQ(model.wrong, 0);
    group.impl()->barrier("the end");
  });
}

TEST(CaptureTest, DistanceAndCapBoundWhatIsGatheredAhead) {
  run_ranks(2, [](const ShardGroup& group) {
    for (const int distance : {0, 1, 3}) {
      for (const bool capped : {false, true}) {
        RuntimeOptions options = graphed();
        options.distance = distance;
        if (capped) options.cap_bytes = kBuffer;
        Model model(group, options, 6, false);
        CapturedStep forward = model.runtime.capture([&] { model.forward(); });
        forward.replay();
        const int buffers = capped ? 1 : distance + 1;
        const RuntimeReport report = model.runtime.report();
        EXPECT_EQ(report.captured_bytes, buffers * kBuffer);
        EXPECT_EQ(report.prefetched, distance == 0 ? 0 : 6);
        EXPECT_EQ(report.on_demand, distance == 0 ? 6 : 0);
        EXPECT_EQ(model.wrong, 0);
        group.impl()->barrier("the next");
      }
    }
  });
}

TEST(CaptureTest, GraphedBuffersMoveToACapturePool) {
  run_ranks(2, [](const ShardGroup& group) {
    std::map<std::byte*, int64_t> pool;
    FullWeight outside;
    {
      Model model(group, graphed(), 2, false);
      model.forward();
      model.update(2);
      model.forward();
      outside = model.runtime.acquire(model.ids[0], Phase::kForward);
      const CapturePool memory{
          .allocate =
              [&](int64_t bytes) {
                auto* data = static_cast<std::byte*>(::operator new(static_cast<size_t>(bytes), std::align_val_t(64)));
                pool[data] = bytes;
                return data;
              },
          .free =
              [&](std::byte* data, int64_t bytes) {
                EXPECT_EQ(pool.at(data), bytes);
                pool.erase(data);
                ::operator delete(data, std::align_val_t(64));
              }};
      EXPECT_THAT(error_of([&] { model.runtime.reallocate({}); }), HasSubstr("has two functions"));
      EXPECT_THAT(error_of([&] { model.runtime.reallocate(memory); }), HasSubstr("only between steps"));
      outside.release();
      model.runtime.reallocate(memory);
      EXPECT_FALSE(pool.empty());
      CapturedStep forward = model.runtime.capture([&] { model.forward(); });
      EXPECT_THAT(error_of([&] { model.runtime.reallocate(memory); }), HasSubstr("before anything is captured"));
      for (int64_t version = 3; version < 6; ++version) {
        forward.replay();
        model.forward();
        model.update(version);
      }
      EXPECT_EQ(model.wrong, 0);
      outside = model.runtime.acquire(model.ids[0], Phase::kForward);
      EXPECT_TRUE(pool.contains(static_cast<std::byte*>(const_cast<void*>(outside.data()))));
      group.impl()->barrier("the end");
    }
    EXPECT_FALSE(pool.empty());
    EXPECT_EQ(wrong_elements(outside, 0, 5), 0);
    outside.release();
    EXPECT_TRUE(pool.empty());
  });
}

TEST(CaptureTest, OneRankReplaysWithItsShardItself) {
  CapturedStep step;
  {
    Model model(ShardGroup::single(test_group()), graphed(), 2, true);
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
