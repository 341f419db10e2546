#include "etp/gather_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <future>
#include <thread>
#include <vector>

#include "base/mutation.h"
#include "base/testing.h"

namespace tessera::etp {
namespace {

using testing::HasSubstr;

class GatherMemoryTest : public testing::Test {
 protected:
  std::unique_ptr<Parameter> weight(WeightId id, int64_t rows) {
    const WeightSpec spec{.name = "w" + std::to_string(id), .rows = rows, .columns = 4};
    return make_parameter(shard_weight(id, spec, 0, 2, {}), *device_);
  }

  // From memory_, unless another one is given.
  GatherMemory::Taken take(Parameter& w, StateStep step = StateStep::kRunNow, GatherMemory* memory = nullptr) {
    const std::array<Parameter*, 1> list{&w};
    std::vector<GatherMemory::Taken> taken;
    (memory == nullptr ? memory_ : *memory).take(list, Plane::kRow, step, {}, taken);
    return taken.front();
  }

  std::shared_ptr<device::Device> device_ = device::make_device(DeviceKind::kHost);
  GatherMemory memory_{device_, *device_, device_->caller(), {.poison = true}};
};

TEST_F(GatherMemoryTest, ABufferHoldsWhatItsStampSays) {
  const auto w = weight(0, 20);
  w->publication.version = 3;
  const GatherMemory::Taken taken = take(*w);
  const auto use = [&] {
    const std::array<Parameter*, 1> list{w.get()};
    memory_.use({&taken.slot, 1}, list, Plane::kRow, true);
  };
  EXPECT_EQ(error_of(use), "(no error)");
  w->publication.version = 4;
  EXPECT_THAT(error_of(use),
              HasSubstr("\"w0\": version 4 of the row plane as f32 is wanted, and the buffer holds version 3"));
  mutation().store(Mutation::kStampNotCompared);  // which would be found here
  EXPECT_EQ(error_of(use), "(no error)");
  mutation().store(Mutation::kNone);
  memory_.release(taken.slot);
}

TEST_F(GatherMemoryTest, AListIsTakenAtOnce) {
  const auto first = weight(0, 20), second = weight(1, 60);
  const std::array<Parameter*, 2> list{first.get(), second.get()};
  std::vector<GatherMemory::Taken> taken;
  memory_.take(list, Plane::kRow, StateStep::kStart, {}, taken);
  ASSERT_EQ(taken.size(), 2U);
  const std::array<uint32_t, 2> slots{taken[0].slot, taken[1].slot};
  EXPECT_EQ(memory_.state_of(1), WeightState::kAsyncWait);
  memory_.arrive(slots);
  EXPECT_EQ(memory_.state_of(0), WeightState::kDataReady);
  EXPECT_EQ(memory_.state_of(1), WeightState::kDataReady);
  memory_.use(slots, list, Plane::kRow, true);
  const std::array<Parameter*, 2> exchanged{second.get(), first.get()};
  EXPECT_THAT(error_of([&] { memory_.use(slots, exchanged, Plane::kRow, true); }), HasSubstr("\"w0\""));
  for (const uint32_t slot : slots) memory_.release(slot);
}

TEST_F(GatherMemoryTest, ReleasedBuffersArePoisonedAndTheirPaddingIsZeroedAgain) {
  const auto w = weight(0, 20);  // of 32 with padding
  GatherMemory::Taken taken = take(*w);
  EXPECT_EQ(taken.padding.size(), 12U * 4 * 4);
  EXPECT_EQ(taken.padding.data(), taken.data + 20 * 4 * 4);
  std::byte* const data = taken.data;
  memory_.release(taken.slot);
  EXPECT_EQ(data[0], std::byte{0xff});
  taken = take(*w);
  EXPECT_EQ(taken.data, data);
  EXPECT_EQ(taken.padding.size(), 12U * 4 * 4);
  memory_.release(taken.slot);
}

TEST_F(GatherMemoryTest, AStateThatCannotBeIsAnErrorThatNamesTheWeight) {
  const auto w = weight(7, 20);
  const GatherMemory::Taken taken = take(*w);
  EXPECT_THAT(error_of([&] { memory_.arrive({&taken.slot, 1}); }), HasSubstr("w7"));
  EXPECT_EQ(memory_.state(taken.slot), WeightState::kDataReadySync);
  memory_.release(taken.slot);
}

TEST_F(GatherMemoryTest, WhatAWholeStepHasNotUsedIsFreed) {
  const auto w = weight(0, 20);
  memory_.release(take(*w).slot);
  EXPECT_EQ(memory_.end_step(), 0);
  EXPECT_EQ(memory_.end_step(), 32 * 4 * 4);
  EXPECT_EQ(memory_.report().bytes, 0);
}

TEST_F(GatherMemoryTest, IdleBuffersOfOtherShapesAreFreedBelowTheCap) {
  GatherMemory memory(device_, *device_, device_->caller(), {.cap_bytes = 64 * 4 * 4});
  const auto small = weight(0, 20);  // 32 rows with padding
  const auto large = weight(1, 60);  // 64
  const std::array<Parameter*, 1> next{large.get()};
  memory.release(take(*small, StateStep::kRunNow, &memory).slot);
  memory.make_room(next, Plane::kRow);
  EXPECT_EQ(memory.report().bytes, 0);
  const GatherMemory::Taken held = take(*large, StateStep::kRunNow, &memory);
  EXPECT_EQ(memory.report().most_bytes, 64 * 4 * 4);
  EXPECT_EQ(memory.report().over_cap, 0);
  EXPECT_EQ(memory.kept_bytes(), 64 * 4 * 4);
  // Two at once need more.
  memory.release(take(*small, StateStep::kRunNow, &memory).slot);
  EXPECT_EQ(memory.report().over_cap, 1);
  memory.release(held.slot);
}

TEST_F(GatherMemoryTest, ABufferIsNotFreedBeforeItsLastReaderHasEnded) {
  const auto compute = device_->make_stream({.name = "compute"});
  GatherMemory memory(device_, *device_, compute, {.cap_bytes = 64 * 4 * 4});
  const auto small = weight(0, 20);
  const auto large = weight(1, 60);
  const std::array<Parameter*, 1> next{large.get()};
  const GatherMemory::Taken taken = take(*small, StateStep::kRunNow, &memory);
  std::promise<void> told;
  std::atomic<bool> read = false;
  compute->enqueue({.name = "read", .body = [&, data = taken.data] {
                      told.get_future().wait();
                      std::memset(data, 1, 16);
                      read = true;
                    }});
  memory.release(taken.slot);
  std::thread room([&] {
    memory.make_room(next, Plane::kRow);
    EXPECT_TRUE(read);
  });
  memory.kept_bytes();  // the wait holds no lock
  told.set_value();
  room.join();
  EXPECT_EQ(memory.report().bytes, 0);
  memory.close();
}

// That it failed has been told; the next gather has nothing to wait for.
TEST_F(GatherMemoryTest, AGatherThatFailedDoesNotPoisonTheNextOne) {
  const auto stream = device_->make_stream({.name = "gather"});
  const auto w = weight(0, 20);
  for (const bool ends_first : {false, true}) {
    const GatherMemory::Taken taken = take(*w, StateStep::kStart);
    std::promise<void> told;
    stream->enqueue({.name = "gather", .body = [&] {
                       told.get_future().wait();
                       throw Error(ErrorCode::kPeerLost, "rank 1 is gone");
                     }});
    const device::Event arrives = stream->record();
    if (!ends_first) memory_.drop(taken.slot, arrives);
    told.set_value();
    EXPECT_THROW(stream->synchronize(Deadline::after(std::chrono::seconds(60))), Error);
    static_cast<void>(stream->take_error());
    if (ends_first) memory_.drop(taken.slot, arrives);

    const GatherMemory::Taken next = take(*w);
    EXPECT_EQ(next.data, taken.data);
    bool gathered = false;
    stream->wait(next.last_reader);
    stream->enqueue({.name = "gather", .body = [&] { gathered = true; }});
    stream->synchronize(Deadline::after(std::chrono::seconds(60)));
    EXPECT_TRUE(gathered);
    memory_.release(next.slot);
  }
}

TEST_F(GatherMemoryTest, BuffersMoveToACapturePoolAndAreReadToTheEnd) {
  const auto compute = device_->make_stream({.name = "compute"});
  GatherMemory memory(device_, *device_, compute, {});
  const auto w = weight(0, 20);
  w->weight.chain = Chain::kGraphed;
  const GatherMemory::Taken taken = take(*w, StateStep::kRunNow, &memory);
  std::promise<void> told, moved;
  std::atomic<bool> read = false;
  compute->enqueue({.name = "read", .body = [&, data = taken.data] {
                      told.get_future().wait();
                      std::memset(data, 1, 16);
                      read = true;
                    }});
  memory.release(taken.slot);
  alignas(64) std::array<std::byte, 32 * 4 * 4> pool{};
  std::atomic<int> freed = 0;
  std::thread move([&] {
    memory.reallocate({.allocate =
                           [&](int64_t bytes) {
                             EXPECT_EQ(bytes, std::ssize(pool));
                             moved.set_value();
                             return pool.data();
                           },
                       .free = [&](std::byte*, int64_t, const LastReader&) { ++freed; }});
    EXPECT_TRUE(read);
  });
  moved.get_future().wait();
  EXPECT_EQ(memory.kept_bytes(), 0);  // the wait holds no lock
  told.set_value();
  move.join();
  const GatherMemory::Taken again = take(*w, StateStep::kRunNow, &memory);
  EXPECT_EQ(again.data, pool.data());
  memory.close();
  EXPECT_EQ(freed, 0);
  memory.release(again.slot);
  EXPECT_EQ(freed, 1);
}

}  // namespace
}  // namespace tessera::etp
