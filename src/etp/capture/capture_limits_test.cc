// What captures refuse, what they survive, and whose memory is whose.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <new>
#include <stdexcept>

#include "base/testing.h"
#include "etp/capture/capture_testing.h"

namespace tessera::etp {
namespace {

using testing::HasSubstr;

TEST(CaptureLimitsTest, AddressesAreKeptForCapturesWhileOneLives) {
  run_ranks(2, [](const ShardGroup& group) {
    RuntimeOptions options = graphed();
    options.prefetch = PrefetchMode::kOff;
    CapturedModel model(group, options, 2, false);
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

TEST(CaptureLimitsTest, RefusesWhatAReplayCouldNotRepeat) {
  run_ranks(2, [](const ShardGroup& group) {
    RuntimeOptions options = graphed();
    options.publish = PublishAt::kFirstUse;
    CapturedModel model(group, options, 2, false);
    Runtime& runtime = model.runtime;
    const WeightId w = model.ids[0];
    const auto captured = [&](const std::function<void()>& part) { return error_of([&] { runtime.capture(part); }); };
    EXPECT_THAT(captured([&] { runtime.drain(); }), HasSubstr("drain() cannot be part of a capture"));
    EXPECT_THAT(captured([&] { runtime.begin_update({{w}}); }), HasSubstr("begin_update() cannot be part"));
    EXPECT_THAT(captured([&] { runtime.publish({{w}}); }), HasSubstr("publish() cannot be part"));
    EXPECT_THAT(captured([&] { runtime.capture([] {}); }), HasSubstr("capture() cannot be part"));
    EXPECT_THAT(captured([&] { runtime.acquire(model.other, Phase::kForward); }),
                HasSubstr("\"head\" is of the UNGRAPHED chain"));
    // Also where the program goes on.
    EXPECT_THAT(captured([&] {
                  EXPECT_THAT(error_of([&] { runtime.acquire(model.other, Phase::kForward); }), HasSubstr("UNGRAPHED"));
                }),
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

TEST(CaptureLimitsTest, AReplayWaitsForNoFirstUse) {
  run_ranks(2, [](const ShardGroup& group) {
    RuntimeOptions options = graphed();
    options.publish = PublishAt::kFirstUse;
    CapturedModel model(group, options, 0, false);
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

TEST(CaptureLimitsTest, ACaptureThatThrowsLeavesNothing) {
  run_ranks(2, [](const ShardGroup& group) {
    CapturedModel model(group, graphed(), 2, true);
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

TEST(CaptureLimitsTest, APeerThatIsLostEndsAReplay) {
  for (const bool async : {false, true})
    run_ranks(2, [&](const ShardGroup& group) {
      CapturedModel model(group, graphed(), 3, async);
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
TEST(CaptureLimitsTest, AReplayMayBeRepeatedAfterAnError) {
  struct Stopped {};
  run_ranks(2, [](const ShardGroup& group) {
    RuntimeOptions options = graphed();
    bool stop = false;
    options.while_waiting = [&] {
      if (stop) throw Stopped();
    };
    CapturedModel model(group, options, 3, false);
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

// A host program may drop it wherever it waits, as a garbage collector does.
TEST(CaptureLimitsTest, ACaptureMayBeDroppedInsideOfACall) {
  std::atomic<bool> dropped = false;
  run_ranks(2, [&](const ShardGroup& group) {
    CapturedStep forward;
    RuntimeOptions options = graphed();
    bool drops = false;
    options.while_waiting = [&] {
      if (!drops) return;
      forward = {};
      dropped = true;
      dropped.notify_all();
    };
    CapturedModel model(group, options, 2, false);
    forward = model.runtime.capture([&] { model.forward(); });
    forward.replay();
    if (group.rank() == 0) {
      drops = true;
      model.runtime.begin_update(model.ids);  // the other rank comes once it is dropped
      drops = false;
      EXPECT_FALSE(forward);
    } else {
      dropped.wait(false);
      model.runtime.begin_update(model.ids);
      forward = {};
    }
    EXPECT_EQ(model.runtime.report().captured_bytes, 0);
    model.runtime.end_update();
    group.impl()->barrier("the end");
  });
}

TEST(CaptureLimitsTest, GraphedBuffersMoveToACapturePool) {
  run_ranks(2, [](const ShardGroup& group) {
    std::map<std::byte*, int64_t> pool;
    FullWeight outside;
    {
      CapturedModel model(group, graphed(), 2, false);
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

}  // namespace
}  // namespace tessera::etp
