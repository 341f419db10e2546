#include "device/capture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "device/cpu_device.h"
#include "device/testing.h"
#include "device/virtual/virtual_world.h"

namespace tessera::device {
namespace {

TEST(Capture, RunsNothingUntilItIsReplayed) {
  CpuDevice device;
  const auto gather = device.make_stream({.name = "gather"});
  const auto compute = device.caller();
  std::vector<std::string> seen;
  Capture capture;
  {
    const CaptureScope scope(capture, {gather, compute});
    gather->enqueue(call([&] { seen.emplace_back("gather"); }));
    compute->wait(gather->record());
    compute->enqueue(call([&] { seen.emplace_back("compute"); }));
    gather->wait(compute->record());
    gather->enqueue(call([&] { seen.emplace_back("fold"); }));
  }
  EXPECT_EQ(capture.operations(), 3u);
  gather->synchronize(soon());
  EXPECT_TRUE(seen.empty());
  for (int i = 0; i < 3; ++i) capture.replay();
  gather->synchronize(soon());
  EXPECT_THAT(seen, testing::ElementsAre("gather", "compute", "fold", "gather", "compute", "fold", "gather", "compute",
                                         "fold"));
}

TEST(Capture, ItsEventsAreThoseOfTheLastReplay) {
  CpuDevice device;
  const auto stream = device.make_stream({.name = "gather"});
  TestWord gate;
  std::atomic<uint64_t> wanted{0};
  // A condition that reads what it wants from memory that the owner updates.
  class Wanted final : public Condition {
   public:
    Wanted(const TestWord& word, const std::atomic<uint64_t>& value) : word_(word), value_(value) {}
    bool met() const override { return word_.get() >= value_; }
    void sleep(const Deadline& deadline) const override { word_.reaches(value_, "it")->sleep(deadline); }
    std::string to_string() const override { return "it"; }

   private:
    const TestWord& word_;
    const std::atomic<uint64_t>& value_;
  };
  Capture capture;
  Event event;
  {
    const CaptureScope scope(capture, {stream});
    stream->enqueue({.name = "gather", .after = {std::make_shared<Wanted>(gate, wanted)}});
    event = stream->record();
  }
  EXPECT_THAT(error_of([&] { device.wait_host(event, soon()); }), testing::HasSubstr("was not replayed"));
  EXPECT_THAT(error_of([&] { stream->wait(event); }), testing::HasSubstr("was not replayed"));
  for (uint64_t version = 1; version < 50; ++version) {
    wanted = version;
    capture.replay();
    EXPECT_FALSE(event.done());
    gate.set(version);
    device.wait_host(event, soon());
    EXPECT_TRUE(event.done());
  }
}

TEST(Capture, RefusesWhatCannotBeReplayed) {
  CpuDevice device;
  const auto inside = device.make_stream({.name = "inside"});
  const auto outside = device.make_stream({.name = "outside"});
  Capture capture, other;
  const CaptureScope scope(capture, {inside});
  outside->enqueue(call([] {}));
  EXPECT_EQ(error_of([&] { inside->wait(outside->record()); }),
            "stream inside is being captured and cannot wait for an event of stream outside from outside of the "
            "capture: wait for it before the replay");
  inside->wait(Event());
  EXPECT_EQ(error_of([&] { outside->wait(inside->record()); }),
            "this event belongs to a capture that was not replayed since: replay it, then wait");
  EXPECT_EQ(error_of([&] { inside->synchronize(soon()); }),
            "stream inside is being captured: nothing runs that could be waited for");
  EXPECT_EQ(error_of([&] { const CaptureScope second(other, {outside, inside}); }),
            "stream inside is being captured already");
  EXPECT_EQ(error_of([&] { capture.replay(); }), "stream inside is being captured: nothing can be replayed on it now");
  const CaptureScope third(other, {outside});  // the one that failed has let go of it
}

TEST(Capture, AFailureInAReplayPoisonsItsStream) {
  CpuDevice device;
  const auto stream = device.make_stream({.name = "gather"});
  bool fails = false;
  int later = 0;
  Capture capture;
  {
    const CaptureScope scope(capture, {stream});
    stream->enqueue(call([&] {
      if (fails) throw Error(ErrorCode::kPeerLost, "rank 2 is gone");
    }));
    stream->enqueue(call([&] { ++later; }));
  }
  capture.replay();
  stream->synchronize(soon());
  fails = true;
  capture.replay();
  EXPECT_EQ(error_of([&] { stream->synchronize(soon()); }), "peer-lost: run: rank 2 is gone");
  EXPECT_EQ(later, 1);
}

TEST(Capture, TheHostIsCalledInItsPlace) {
  CpuDevice device;
  const auto compute = device.caller();
  std::vector<int> seen;
  bool fails = false;
  Capture capture;
  {
    const CaptureScope scope(capture, {compute});
    compute->enqueue(call([&] { seen.push_back(1); }));
    capture.call([&] {
      if (fails) throw Error(ErrorCode::kCancelled, "not now");
      seen.push_back(2);
    });
    compute->enqueue(call([&] { seen.push_back(3); }));
  }
  EXPECT_EQ(capture.operations(), 2u);
  capture.replay();
  EXPECT_THAT(seen, testing::ElementsAre(1, 2, 3));
  fails = true;
  EXPECT_EQ(error_of([&] { capture.replay(); }), "cancelled: not now");
  EXPECT_THAT(seen, testing::ElementsAre(1, 2, 3, 1));
  fails = false;
  capture.replay();
  EXPECT_THAT(seen, testing::ElementsAre(1, 2, 3, 1, 1, 2, 3));
}

TEST(Capture, WorksOnVirtualStreams) {
  for (const Order order : {Order::kRandom, Order::kLatestFirst, Order::kEarliestFirst}) {
    VirtualWorld world(1, order);
    int value = 0;
    world.run(1, [&](int rank) {
      Device& device = world.device(rank);
      const auto one = device.make_stream({.name = "one"});
      const auto two = device.make_stream({.name = "two"});
      Capture capture;
      Event end;
      {
        const CaptureScope scope(capture, {one, two});
        one->enqueue(call([&] { value += 1; }));
        two->wait(one->record());
        two->enqueue(call([&] { value *= 2; }));
        end = two->record();
      }
      for (int i = 0; i < 3; ++i) {
        capture.replay();
        device.wait_host(end, soon());
      }
    });
    EXPECT_EQ(value, 14);
  }
}

}  // namespace
}  // namespace tessera::device
