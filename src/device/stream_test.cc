#include <dirent.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <numeric>
#include <thread>

#include "device/cpu_device.h"
#include "device/link.h"
#include "device/testing.h"

namespace tessera::device {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

Operation failing(const std::string& subject = {}) {
  return {.name = "gather", .subject = subject, .body = [] { throw Error(ErrorCode::kDataLoss, "the row is torn"); }};
}

// Names of this process' threads.
std::vector<std::string> threads() {
  std::vector<std::string> names;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    if (!name.empty()) names.push_back(name);
  }
  return names;
}

template <typename Predicate>
bool comes_true(Predicate predicate) {
  const Deadline deadline = soon();
  while (!predicate()) {
    if (deadline.passed()) return false;
    std::this_thread::yield();
  }
  return true;
}

TEST(Stream, RunsOperationsInOrder) {
  CpuDevice device;
  const auto stream = device.make_stream({.name = "order"});
  std::vector<int> seen;
  for (int i = 0; i < 1000; ++i) stream->enqueue(call([&seen, i] { seen.push_back(i); }));
  stream->synchronize(soon());
  std::vector<int> all(1000);
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(seen, all);
}

TEST(Stream, InlineRunsAtOnceOnTheCallersThread) {
  CpuDevice device;
  std::thread::id where;
  device.caller()->enqueue(call([&] { where = std::this_thread::get_id(); }));
  EXPECT_EQ(where, std::this_thread::get_id());
  EXPECT_TRUE(device.caller()->record().done());
  EXPECT_TRUE(device.caller()->runs_inline());
}

TEST(Stream, HostsThatWaitRunWhatTheThreadHasNotBegun) {
  CpuDevice device;
  const auto stream = device.make_stream({.name = "helped", .helped = true});
  const std::thread::id host = std::this_thread::get_id();
  int given = 0, ran = 0;
  bool helped = false;
  EXPECT_TRUE(comes_true([&] {  // now and then the thread is faster
    for (int i = 0; i < 3; ++i)
      stream->enqueue(call([&, number = given++] {
        EXPECT_EQ(ran++, number);
        helped |= std::this_thread::get_id() == host;
      }));
    device.wait_host(stream->record(), soon());
    EXPECT_EQ(ran, given);
    return helped;
  }));
}

TEST(Stream, HelpersLeaveToTheThreadWhatHasToWait) {
  CpuDevice device;
  const auto stream = device.make_stream({.name = "helped", .helped = true});
  const auto other = device.make_stream({.name = "other"});
  TestWord gate, opened;
  for (uint64_t turn = 1; turn <= 200; ++turn) {
    std::vector<int> order;
    stream->enqueue(call([&] { order.push_back(1); }));
    stream->enqueue({.name = "gate", .after = {gate.reaches(turn, "the gate")}, .body = [&] { order.push_back(2); }});
    other->enqueue({.name = "other", .after = {opened.reaches(turn, "opened")}});
    stream->wait(other->record());
    stream->enqueue(call([&] { order.push_back(3); }));
    const Event end = stream->record();
    end.help();
    EXPECT_FALSE(end.done());
    gate.set(turn);
    opened.set(turn);
    device.wait_host(end, soon());
    EXPECT_THAT(order, ElementsAre(1, 2, 3));
  }
}

TEST(Stream, ManyHostsHelpWhileOthersEnqueue) {
  CpuDevice device;
  auto stream = device.make_stream({.name = "helped", .helped = true});
  std::atomic<int> ran = 0, at_once = 0;
  std::atomic<bool> overlapped = false;
  constexpr int kHosts = 4, kEach = 500;
  std::vector<std::thread> hosts;
  for (int h = 0; h < kHosts; ++h)
    hosts.emplace_back([&] {
      for (int i = 0; i < kEach; ++i) {
        stream->enqueue(call([&] {
          if (at_once++ != 0) overlapped = true;
          ++ran;
          --at_once;
        }));
        if (i % 3 == 0) device.wait_host(stream->record(), soon());
      }
    });
  for (std::thread& host : hosts) host.join();
  const Event end = stream->record();
  stream.reset();  // its events outlive it
  device.wait_host(end, soon());
  EXPECT_EQ(ran, kHosts * kEach);
  EXPECT_FALSE(overlapped);
}

TEST(Stream, AHelperMeetsAFailureAsTheThreadDoes) {
  CpuDevice device;
  const auto stream = device.make_stream({.name = "helped", .helped = true});
  for (int turn = 0; turn < 100; ++turn) {
    bool ran = false;
    stream->enqueue(failing("w"));
    stream->enqueue(call([&] { ran = true; }));
    EXPECT_THAT(error_of([&] { device.wait_host(stream->record(), soon()); }), HasSubstr("gather w: the row is torn"));
    EXPECT_FALSE(ran);
    EXPECT_FALSE(stream->take_error().ok());
    stream->enqueue({.name = "lost", .after = {std::make_shared<LostCondition>()}});
    EXPECT_THAT(error_of([&] { device.wait_host(stream->record(), soon()); }), HasSubstr("rank 2 is gone"));
    EXPECT_FALSE(stream->take_error().ok());
  }
}

TEST(Stream, CopiesBetweenBuffers) {
  CpuDevice device;
  const Buffer from = device.allocate(BufferKind::kPrivate, 100, "from");
  const Buffer to = device.allocate(BufferKind::kShared, 100, "to");
  std::ranges::fill(from.span(), std::byte{7});
  const auto stream = device.make_stream({.name = "copy"});
  stream->enqueue(copy_operation("copy", "w", to.data(), from.data(), 100));
  stream->synchronize(soon());
  EXPECT_TRUE(std::ranges::equal(from.span(), to.span()));
}

TEST(Stream, AnEventIsWhatTheStreamHadBeenGiven) {
  CpuDevice device;
  const auto stream = device.make_stream({.name = "events"});
  TestWord gate;
  stream->enqueue(call([] {}));
  const Event before = stream->record();
  stream->enqueue({.name = "wait", .after = {gate.reaches(1, "the gate")}});
  const Event after = stream->record();
  device.wait_host(before, soon());
  EXPECT_FALSE(after.done());
  gate.set(1);
  device.wait_host(after, soon());
  EXPECT_TRUE(after.done());
  EXPECT_TRUE(Event().done());
}

TEST(Stream, StreamsWaitForEachOthersEvents) {
  CpuDevice device;
  const auto first = device.make_stream({.name = "first"});
  const auto second = device.make_stream({.name = "second"});
  int value = 0;  // not atomic: the events order all accesses
  for (int round = 0; round < 200; ++round) {
    first->enqueue(call([&] { ++value; }));
    second->wait(first->record());
    second->enqueue(call([&] { value *= 2; }));
    first->wait(second->record());
    first->enqueue(call([&] { value %= 1000; }));
  }
  first->synchronize(soon());
  int expected = 0;
  for (int round = 0; round < 200; ++round) expected = (expected + 1) * 2 % 1000;
  EXPECT_EQ(value, expected);
}

TEST(Stream, ManyHostThreadsWaitForDifferentEvents) {
  CpuDevice device;
  const auto stream = device.make_stream({.name = "many"});
  TestWord gate;
  std::vector<Event> events;
  for (uint64_t i = 1; i <= 32; ++i) {
    stream->enqueue({.name = "step", .after = {gate.reaches(i, "a step")}});
    events.push_back(stream->record());
  }
  std::atomic<int> woken{0};
  std::vector<std::thread> waiting;
  for (const Event& event : events)
    waiting.emplace_back([&device, &woken, event] {
      device.wait_host(event, soon());
      ++woken;
    });
  for (uint64_t i = 1; i <= 32; ++i) {
    gate.set(i);
    device.wait_host(events[i - 1], soon());
  }
  for (std::thread& thread : waiting) thread.join();
  EXPECT_EQ(woken, 32);
}

TEST(Stream, AFailurePoisonsWhatComesLater) {
  CpuDevice device;
  const auto stream = device.make_stream({.name = "poison"});
  const auto other = device.make_stream({.name = "other"});
  bool later = false, elsewhere = false;
  stream->enqueue(call([] {}));
  const Event good = stream->record();
  stream->enqueue(failing("wte.weight"));
  const Event bad = stream->record();
  stream->enqueue(call([&] { later = true; }));
  other->wait(bad);
  other->enqueue(call([&] { elsewhere = true; }));
  const std::string text = "data-loss: gather wte.weight: the row is torn";
  EXPECT_EQ(error_of([&] { device.wait_host(bad, soon()); }), text);
  EXPECT_EQ(error_of([&] { stream->synchronize(soon()); }), text);
  EXPECT_EQ(error_of([&] { other->synchronize(soon()); }), text);
  device.wait_host(good, soon());
  EXPECT_FALSE(later);
  EXPECT_FALSE(elsewhere);
  EXPECT_EQ(stream->status().message(), "gather wte.weight: the row is torn");
}

TEST(Stream, TakenErrorsAreForgottenButNotByTheirEvents) {
  CpuDevice device;
  for (const auto& stream : {device.make_stream({.name = "thread"}), device.caller()}) {
    EXPECT_TRUE(stream->take_error().ok());
    stream->enqueue(failing());
    const Event bad = stream->record();
    EXPECT_FALSE(bad.wait(soon()) && bad.status().ok());
    EXPECT_EQ(stream->take_error().code(), ErrorCode::kDataLoss);
    const Event good = stream->record();
    device.wait_host(good, soon());
    bool ran = false;
    stream->enqueue(call([&] { ran = true; }));
    stream->synchronize(soon());
    EXPECT_TRUE(ran);
    EXPECT_TRUE(stream->status().ok());
    EXPECT_EQ(bad.status().code(), ErrorCode::kDataLoss);
  }
}

TEST(Stream, InlineFailuresPoisonToo) {
  CpuDevice device;
  const auto stream = device.make_stream({.name = "inline", .runs_inline = true});
  const auto other = device.make_stream({.name = "other"});
  bool later = false;
  stream->enqueue(failing());
  stream->enqueue(call([&] { later = true; }));
  EXPECT_FALSE(later);
  other->wait(stream->record());
  EXPECT_EQ(error_of([&] { other->synchronize(soon()); }), "data-loss: gather: the row is torn");
  const auto third = device.make_stream({.name = "third", .runs_inline = true});
  third->wait(other->record());
  EXPECT_EQ(error_of([&] { third->synchronize(soon()); }), "data-loss: gather: the row is torn");
}

TEST(Stream, WhatCannotBeMetFailsTheOperation) {
  CpuDevice device;
  for (const bool inline_stream : {false, true}) {
    const auto stream = device.make_stream({.name = "lost", .runs_inline = inline_stream});
    stream->enqueue({.name = "gather", .subject = "w", .after = {std::make_shared<LostCondition>()}});
    EXPECT_EQ(error_of([&] { stream->synchronize(soon()); }), "peer-lost: gather w: rank 2 is gone");
  }
}

TEST(Stream, WaitsOfOperationsEndAtTheirTimeout) {
  CpuDevice device;
  const TestWord gate;
  for (const bool inline_stream : {false, true}) {
    const auto stream =
        device.make_stream({.name = "slow", .timeout = std::chrono::milliseconds(20), .runs_inline = inline_stream});
    stream->enqueue({.name = "gather", .after = {gate.reaches(1, "rank 1 to publish version 3 of w")}});
    const auto timed_out =
        testing::MatchesRegex("deadline-exceeded: gather: waited .* s for rank 1 to publish version 3 of w");
    EXPECT_THAT(error_of([&] { stream->synchronize(soon()); }), timed_out);
    const auto patient = device.make_stream({.name = "patient", .runs_inline = inline_stream});
    patient->enqueue({.name = "gather",
                      .after = {gate.reaches(1, "rank 1 to publish version 3 of w")},
                      .timeout = std::chrono::milliseconds(20)});
    EXPECT_THAT(error_of([&] { patient->synchronize(soon()); }), timed_out);
  }
}

TEST(Stream, TheHostWaitsUntilItsDeadline) {
  CpuDevice device;
  TestWord gate;
  const auto stream = device.make_stream({.name = "gather"});
  stream->enqueue({.name = "gather", .after = {gate.reaches(1, "the gate")}});
  EXPECT_THAT(error_of([&] { stream->synchronize(Deadline::after(std::chrono::milliseconds(20))); }),
              testing::MatchesRegex("deadline-exceeded: waited .* s for stream gather, which has not come so far"));
  EXPECT_FALSE(stream->record().wait(Deadline::after(std::chrono::milliseconds(1))));
  gate.set(1);
  stream->synchronize(soon());
}

TEST(Stream, EndsAfterWhatItWasGiven) {
  CpuDevice device;
  int ran = 0;
  Event last;
  {
    const auto stream = device.make_stream({.name = "end"});
    for (int i = 0; i < 100; ++i) stream->enqueue(call([&] { ++ran; }));
    last = stream->record();
  }
  EXPECT_EQ(ran, 100);
  EXPECT_TRUE(last.done());
}

TEST(Stream, CloseDropsWhatHasNotBegunAtTheDeadline) {
  CpuDevice device;
  TestWord gate, begun;
  const auto stream = device.make_stream({.name = "close"});
  stream->enqueue(call([&] {
    begun.set(1);
    await(*gate.reaches(1, "the gate"), soon());
  }));
  const Event first = stream->record();
  bool ran = false;
  stream->enqueue(call([&] { ran = true; }));
  const Event second = stream->record();
  await(*begun.reaches(1, "the first operation"), soon());
  std::thread opener([&] {
    EXPECT_TRUE(comes_true([&] { return !error_of([&] { stream->enqueue(call([] {})); }).starts_with("(no"); }));
    gate.set(1);
  });
  stream->close(Deadline::after(Duration::zero()));
  opener.join();
  EXPECT_FALSE(ran);
  EXPECT_TRUE(first.status().ok());
  EXPECT_EQ(second.status().code(), ErrorCode::kCancelled);
  EXPECT_EQ(second.status().message(), "stream close was closed before this ran");
  EXPECT_EQ(error_of([&] { stream->enqueue(call([] {})); }), "stream close is closed");
  stream->close(soon());
}

TEST(Stream, WhatAnOperationHoldsIsReleasedBeforeItsEndIsSeen) {
  CpuDevice device;
  const auto stream = device.make_stream({.name = "hold"});
  for (int i = 0; i < 100; ++i) {
    auto held = std::make_shared<int>(1);
    const std::weak_ptr<int> seen = held;
    stream->enqueue(call([kept = std::move(held)] {}));
    stream->synchronize(soon());
    EXPECT_TRUE(seen.expired());
  }
}

TEST(Stream, APacedStreamEndsNoEarlierThanItsLinkAllows) {
  CpuDevice device;
  const auto link = std::make_shared<Link>(1e6);
  const auto thread = device.make_stream({.name = "paced", .link = link});
  const auto here = device.make_stream({.name = "here", .link = link, .runs_inline = true});
  const TimePoint begin = Clock::steady().now();
  thread->enqueue({.name = "pull", .bytes = 10'000});
  thread->enqueue({.name = "pull", .bytes = 10'000});
  thread->synchronize(soon());
  EXPECT_GE(Clock::steady().now() - begin, std::chrono::milliseconds(20));
  here->enqueue({.name = "pull", .bytes = 10'000});
  EXPECT_GE(Clock::steady().now() - begin, std::chrono::milliseconds(30));
}

TEST(Link, IsTakenInOrder) {
  FakeClock clock;
  Link link(1e9, clock);
  const TimePoint begin = clock.now();
  EXPECT_EQ(link.take(1000) - begin, std::chrono::microseconds(1));
  EXPECT_EQ(link.take(2000) - begin, std::chrono::microseconds(3));
  clock.advance(std::chrono::microseconds(10));  // it was idle: nothing is saved up
  EXPECT_EQ(link.take(1000) - begin, std::chrono::microseconds(11));
}

TEST(Stream, ThreadsAreNamedAndSleepWhileIdle) {
  CpuDevice device;
  std::atomic<int> tid{0};
  const auto stream = device.make_stream({.name = "gather"});
  stream->enqueue(call([&] { tid = ::gettid(); }));
  stream->synchronize(soon());
  EXPECT_THAT(threads(), testing::Contains("tessera-s-gathe"));
  EXPECT_TRUE(comes_true([&] {
    std::string stat;
    std::getline(std::ifstream("/proc/self/task/" + std::to_string(tid) + "/stat"), stat);
    return stat.find(") S ") != std::string::npos;
  }));
}

TEST(Stream, AThousandLeaveNothingBehind) {
  std::thread([] {}).join();  // ThreadSanitizer starts a thread of its own together with the first
  CpuDevice device;
  const size_t threads_before = threads().size(), fds_before = open_fds();
  int ran = 0;
  for (int round = 0; round < 20; ++round) {
    std::vector<std::shared_ptr<Stream>> streams;
    for (int i = 0; i < 50; ++i) {
      streams.push_back(device.make_stream({.name = "many"}));
      if (i > 0) streams[static_cast<size_t>(i)]->wait(streams[static_cast<size_t>(i) - 1]->record());
      streams.back()->enqueue(call([&] { ++ran; }));
    }
  }
  EXPECT_EQ(ran, 1000);
  EXPECT_TRUE(comes_true([&] { return threads().size() == threads_before; }));
  EXPECT_EQ(open_fds(), fds_before);
}

TEST(Stream, AForkedChildIsToldAndEnds) {
  CpuDevice device;
  auto stream = device.make_stream({.name = "parent"});
  stream->enqueue(call([] {}));
  stream->synchronize(soon());
  const pid_t child = ::fork();
  if (child == 0) {
    const std::string text = error_of([&] { stream->enqueue(call([] {})); });
    stream.reset();  // does not wait for a thread that is not there
    ::_exit(text == "stream parent: this is a forked child, which does not have the stream's thread; make a stream in "
                    "the child"
                ? 0
                : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  stream->enqueue(call([] {}));
  stream->synchronize(soon());
}

TEST(Device, BuffersAreAlignedCountedAndPoisoned) {
  CpuDevice device({.poison = true});
  {
    const Buffer one = device.allocate(BufferKind::kPrivate, 100, "one");
    const Buffer two = device.allocate(BufferKind::kShared, 1000, "two");
    EXPECT_EQ(reinterpret_cast<uintptr_t>(one.data()) % 64, 0u);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(two.data()) % 64, 0u);
    EXPECT_EQ(two.kind(), BufferKind::kShared);
    EXPECT_EQ(device.allocated(), 1100u);
    EXPECT_FALSE(device.allocate(BufferKind::kPrivate, 0, "nothing"));
    // The heap keeps the arena: what was released can be looked at.
    const std::byte* const bytes = two.data();
    const Buffer kept = device.allocate(BufferKind::kShared, 64, "kept");
    const Buffer moved = std::move(const_cast<Buffer&>(two));
    EXPECT_EQ(moved.data(), bytes);
    EXPECT_EQ(two.data(), nullptr);
  }
  EXPECT_EQ(device.allocated(), 0u);
  EXPECT_THAT(error_of([&] { (void)device.allocate(BufferKind::kShared, size_t{1} << 50, "wte.weight"); }),
              testing::StartsWith("resource-exhausted: wte.weight: "));
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // which end the process
  EXPECT_EQ(error_of([&] { (void)device.allocate(BufferKind::kPrivate, size_t{1} << 60, "wte.weight"); }),
            "resource-exhausted: wte.weight: 1152921504606846976 bytes of memory cannot be had");
#endif
}

TEST(Device, ReleasedSharedMemoryHoldsNaNs) {
  CpuDevice device({.poison = true});
  const Buffer neighbour = device.allocate(BufferKind::kShared, 64, "neighbour");  // keeps the arena
  const std::byte* released = nullptr;
  {
    const Buffer buffer = device.allocate(BufferKind::kShared, 64, "released");
    released = buffer.data();
    EXPECT_EQ(*released, std::byte{0});
  }
  EXPECT_EQ(*released, std::byte{0xff});
}

TEST(Device, AKindThatThisBuildLacksSaysSo) {
  EXPECT_EQ(make_device(DeviceKind::kHost)->name(), "cpu");
  EXPECT_THAT(error_of([] { (void)make_device(DeviceKind::kCuda); }), testing::StartsWith("unimplemented: "));
}

}  // namespace
}  // namespace tessera::device
