// The ring's own code on the machine of ring_model.h: every interleaving within a budget, and random walks
// beyond it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>

#include "command/ring.h"
#include "tests/model/ring_model.h"

namespace tessera {
namespace {

using model::Budget;
using model::Faults;
using model::Machine;
using model::ModelSync;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kSlower = 10;
#else
constexpr int kSlower = 1;
#endif

const Deadline kNever = Deadline::at(TimePoint::max());

// The setup of an execution, and what must hold in it.
class Story {
 public:
  Story(Machine& machine, size_t slots, Duration spin = {}) : machine_(machine), slots_(slots) {
    memory_ = std::make_unique<RingSlot<ModelSync>[]>(slots);
    ring_ = {.header = &header_, .slots = {memory_.get(), slots}};
    producer_.emplace(ring_, spin);
    consumer_.emplace(ring_, spin);
  }

  void require(bool condition, const char* what) {
    if (!condition) machine_.fail(what);
  }

  // Each record holds its number three times.
  RingState push(uint64_t number, const Deadline& deadline = kNever) {
    const RingState state = producer_->push({.incarnation = number, .id = number, .type = 1},
                                            std::as_bytes(std::span(&number, 1)), deadline);
    if (state == RingState::kReady) ++pushed_;
    require(pushed_ <= popped_ + slots_ + 1, "more records than slots");  // a pop may be about to be counted
    return state;
  }
  RingState pop(const Deadline& deadline = kNever) {
    Record record;
    const RingState state = consumer_->pop(record, deadline);
    if (state != RingState::kReady) return state;
    ++popped_;
    uint64_t number = 0;
    require(record.bytes == sizeof number, "the length of another record");
    std::memcpy(&number, record.payload().data(), sizeof number);
    require(number == popped_, "a record lost, doubled, or out of order");
    require(record.head.incarnation == number && record.head.id == number && record.head.type == 1, "a torn record");
    return state;
  }

  void push_all(uint64_t count) {
    for (uint64_t number = 1; number <= count; ++number) require(push(number) == RingState::kReady, "push failed");
    producer_->close();
  }
  void pop_all(uint64_t count) {
    RingState state = RingState::kReady;
    while (state == RingState::kReady) state = pop();
    require(state == RingState::kEnded, "the end is not seen");
    require(popped_ == count, "records lost at the end");
  }

  Machine& machine_;
  const size_t slots_;
  RingHeader<ModelSync> header_;
  std::unique_ptr<RingSlot<ModelSync>[]> memory_;
  BasicRing<ModelSync> ring_;
  std::optional<RingProducer<ModelSync>> producer_;
  std::optional<RingConsumer<ModelSync>> consumer_;
  uint64_t pushed_ = 0;
  uint64_t popped_ = 0;
};

using Plot = std::function<std::unique_ptr<Story>(Machine& machine)>;

struct Explored {
  size_t executions = 0;
  bool complete = false;
  std::string failure;
};

std::string execute(model::Crew& crew, const Plot& plot, model::Choices& choices, Budget budget, Faults faults) {
  Machine machine(crew, choices, budget, faults);
  const std::unique_ptr<Story> story = plot(machine);
  return machine.run();
}

Explored explore(const Plot& plot, Budget budget, Faults faults = {}, size_t most = SIZE_MAX) {
  model::Crew crew(3);
  model::DepthFirst choices;
  Explored explored;
  do {
    ++explored.executions;
    explored.failure = execute(crew, plot, choices, budget, faults);
    explored.complete = !choices.next();
  } while (explored.failure.empty() && explored.executions < most && !explored.complete);
  return explored;
}

Explored walk(const Plot& plot, Budget budget, size_t walks, Faults faults = {}) {
  model::Crew crew(3);
  Explored explored;
  while (explored.failure.empty() && explored.executions < walks) {
    const size_t seed = ++explored.executions;
    model::RandomWalk choices(seed);
    explored.failure = execute(crew, plot, choices, budget, faults);
    if (!explored.failure.empty()) explored.failure += " (seed " + std::to_string(seed) + ")";
  }
  return explored;
}

void expect_sound(const Plot& plot, Budget budget) {
  const Explored all = explore(plot, budget, {}, 60'000);
  EXPECT_EQ(all.failure, "") << "execution " << all.executions;
  EXPECT_TRUE(all.complete);
  const Budget generous{
      .preemptions = 40, .stale_loads = 10, .early_ends = 3 * budget.early_ends, .deaths = budget.deaths};
  const Explored some = walk(plot, generous, 2'000 / kSlower);
  EXPECT_EQ(some.failure, "");
}

Plot stream(size_t slots, uint64_t records, Duration spin = {}) {
  return [=](Machine& machine) {
    auto story = std::make_unique<Story>(machine, slots, spin);
    machine.add_thread([story = story.get(), records] { story->push_all(records); });
    machine.add_thread([story = story.get(), records] { story->pop_all(records); });
    return story;
  };
}

TEST(CommandRingModel, AStreamArrivesInOrderAndItsEndIsSeen) {
  expect_sound(stream(1, 2), {.preemptions = 2, .stale_loads = 2});
  expect_sound(stream(2, 4), {.preemptions = 2, .stale_loads = 2});
}

TEST(CommandRingModel, AStreamArrivesWhereEndsSpinBeforeTheySleep) {
  expect_sound(stream(1, 2, Duration(1)), {.preemptions = 2, .stale_loads = 1});
}

TEST(CommandRingModel, SleepsMayEndForNoReason) {
  expect_sound(stream(1, 2), {.preemptions = 1, .stale_loads = 1, .early_ends = 2});
}

// A wait that ends at its deadline has neither popped nor pushed anything: the next one continues from there.
TEST(CommandRingModel, AWaitThatEndsAtItsDeadlineLosesNothing) {
  const Plot plot = [](Machine& machine) {
    auto story = std::make_unique<Story>(machine, 1);
    machine.add_thread([&story = *story, &machine] {
      for (uint64_t number = 1; number <= 3; ++number)
        while (story.push(number, Deadline::at(machine.now() + Duration(1))) == RingState::kNotYet) continue;
      story.producer_->close();
    });
    machine.add_thread([&story = *story, &machine] {
      RingState state = RingState::kReady;
      while (state == RingState::kReady || state == RingState::kNotYet)
        state = story.pop(Deadline::at(machine.now() + Duration(1)));
      story.require(state == RingState::kEnded && story.popped_ == 3, "records lost at the end");
    });
    return story;
  };
  expect_sound(plot, {.preemptions = 1, .stale_loads = 0, .early_ends = 2});
}

TEST(CommandRingModel, AConsumerThatClosesIsSeenByAProducerThatWaitsForRoom) {
  const Plot plot = [](Machine& machine) {
    auto story = std::make_unique<Story>(machine, 1);
    machine.add_thread([&story = *story] {
      uint64_t number = 1;
      while (story.push(number) == RingState::kReady) ++number;
      story.require(story.push(number) == RingState::kEnded, "an end that does not last");
    });
    machine.add_thread([&story = *story] {
      story.require(story.pop() == RingState::kReady, "nothing came");
      story.consumer_->close();
    });
    return story;
  };
  expect_sound(plot, {.preemptions = 2, .stale_loads = 2});
}

// What a watcher does when it learns of the peer's death.
TEST(CommandRingModel, AnEndIsClosedFromAnotherThreadOfItsProcess) {
  const Plot plot = [](Machine& machine) {
    auto story = std::make_unique<Story>(machine, 1);
    machine.add_thread([&story = *story] { story.push(1); });
    machine.add_thread([&story = *story] {
      RingState state = RingState::kReady;
      while (state == RingState::kReady) state = story.pop();
      story.require(state == RingState::kEnded, "the end is not seen");
    });
    machine.add_thread([&story = *story] { story.consumer_->close(); });
    return story;
  };
  expect_sound(plot, {.preemptions = 2, .stale_loads = 1});
}

TEST(CommandRingModel, ANudgeEndsAWaitOnceAndTakesNothing) {
  const Plot plot = [](Machine& machine) {
    auto story = std::make_unique<Story>(machine, 1);
    machine.add_thread([&story = *story] { story.push_all(2); });
    machine.add_thread([&story = *story] {
      int nudges = 0;
      RingState state = RingState::kReady;
      for (; state == RingState::kReady || state == RingState::kInterrupted; state = story.pop())
        if (state == RingState::kInterrupted) ++nudges;
      story.require(state == RingState::kEnded && story.popped_ == 2, "records lost");
      story.require(nudges <= 1, "one nudge ends two waits");
    });
    machine.add_thread([&story = *story] { story.consumer_->nudge(); });
    return story;
  };
  expect_sound(plot, {.preemptions = 1, .stale_loads = 1});

  const Plot alone = [](Machine& machine) {
    auto story = std::make_unique<Story>(machine, 1);
    machine.add_thread(
        [&story = *story] { story.require(story.pop() == RingState::kInterrupted, "something came out of nothing"); });
    machine.add_thread([&story = *story] { story.consumer_->nudge(); });
    return story;
  };
  expect_sound(alone, {.preemptions = 4, .stale_loads = 2});
}

// SIGKILL at every step of either end; a watcher closes the other, which then pops the complete records and ends.
TEST(CommandRingModel, AnEndWhosePeerDiesAnywhereEnds) {
  for (const bool producer_dies : {true, false}) {
    const Plot plot = [=](Machine& machine) {
      auto story = std::make_unique<Story>(machine, 1);
      machine.add_thread(
          [&story = *story] {
            for (uint64_t number = 1; number <= 2; ++number)
              if (story.push(number) == RingState::kEnded) return;
            story.producer_->close();
          },
          producer_dies);
      machine.add_thread(
          [&story = *story] {
            RingState state = RingState::kReady;
            while (state == RingState::kReady) state = story.pop();
            story.require(state == RingState::kEnded, "the end is not seen");
            story.require(story.popped_ >= story.pushed_, "records lost at the end");
          },
          !producer_dies);
      machine.add_thread([&story = *story, &machine, producer_dies] {
        if (!machine.await_end_of(producer_dies ? 0 : 1)) return;
        producer_dies ? story.consumer_->close() : story.producer_->close();
      });
      return story;
    };
    expect_sound(plot, {.preemptions = 1, .stale_loads = 0, .deaths = 1});
  }
}

Plot watched_stream(size_t slots, uint64_t records) {
  return [=](Machine& machine) {
    auto story = std::make_unique<Story>(machine, slots);
    machine.add_thread([&story = *story, records] { story.push_all(records); });
    machine.add_thread([&story = *story, records] { story.pop_all(records); });
    machine.add_thread([&story = *story, slots] {
      story.require(story.ring_.size() <= slots, "more records than slots");
      uint64_t last = 0;
      for (const PendingRecord& record : story.ring_.pending()) {
        story.require(last == 0 || record.head.id == last + 1, "an onlooker sees records out of order");
        story.require(record.head.incarnation == record.head.id && record.bytes == 8, "an onlooker sees a torn record");
        last = record.head.id;
      }
    });
    return story;
  };
}

TEST(CommandRingModel, AnOnlookerSeesWholeRecordsInOrder) {
  expect_sound(watched_stream(1, 2), {.preemptions = 1, .stale_loads = 1});
  expect_sound(watched_stream(2, 3), {.preemptions = 1, .stale_loads = 1});
}

// The basis of all tests above: they find each mistake that they are meant to find.
TEST(CommandRingModel, FindsEveryMistakeThatTheRingCouldHaveMade) {
  struct Case {
    const char* name;
    Faults faults;
    const char* failure;
    bool watched = false;
  };
  const Case cases[] = {
      {"the flag is set behind the last look", {.flag_after_check = true}, "all threads sleep"},
      {"the flag is stored with release", {.flag_released = true}, "all threads sleep"},
      {"the count is stored with release", {.count_released = true}, "all threads sleep"},
      {"the count is stored relaxed", {.count_relaxed = true}, ""},
      {"the count is read with acquire", {.count_read_acquired = true}, "all threads sleep"},
      {"the count is read relaxed", {.count_read_relaxed = true}, ""},
      {"the futex does not compare", {.sleep_unchecked = true}, "all threads sleep"},
      {"no wake-up call", {.wake_forgotten = true}, "all threads sleep"},
      {"the head is stored relaxed", {.head_relaxed = true}, "an onlooker sees a torn record", true},
  };
  for (const Case& c : cases) {
    const Explored all =
        explore(c.watched ? watched_stream(1, 2) : stream(1, 2), {.preemptions = 2, .stale_loads = 1}, c.faults);
    EXPECT_NE(all.failure, "") << c.name << ": not found in " << all.executions << " executions";
    EXPECT_THAT(all.failure, testing::HasSubstr(c.failure)) << c.name;
    const Explored some =
        walk(c.watched ? watched_stream(2, 4) : stream(1, 3), {.preemptions = 40, .stale_loads = 10}, 20'000, c.faults);
    EXPECT_NE(some.failure, "") << c.name << ": not found in " << some.executions << " random walks";
  }
}

}  // namespace
}  // namespace tessera
