#include "base/event_loop.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <future>
#include <stdexcept>

#include "base/socket.h"

namespace tessera {
namespace {

constexpr auto kLimit = std::chrono::seconds(60);

// Runs `task` on the loop and waits for it.
void run_on(EventLoop& loop, const EventLoop::Task& task) {
  std::promise<void> done;
  ASSERT_TRUE(loop.post([&] {
    task();
    done.set_value();
  }));
  ASSERT_EQ(done.get_future().wait_for(kLimit), std::future_status::ready);
}

void write_byte(int fd) {
  const std::array<std::byte, 1> one{};
  ASSERT_EQ(send_some(fd, one), 1U);
}

TEST(EventLoopTest, TasksOfManyThreadsAllRunEachThreadsInOrder) {
  EventLoop loop("test");
  loop.start();
  constexpr int kThreads = 4, kTasks = 2000;
  std::vector<int> last(kThreads, -1);
  int disorder = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < kTasks; ++i)
        loop.post([&, t, i] {
          auto& previous = last[static_cast<size_t>(t)];
          disorder += previous + 1 != i;
          previous = i;
        });
    });
  for (std::thread& thread : threads) thread.join();
  loop.stop();
  EXPECT_EQ(disorder, 0);
  for (const int count : last) EXPECT_EQ(count, kTasks - 1);
}

TEST(EventLoopTest, AfterStopTasksAreRefused) {
  EventLoop loop("test");
  loop.start();
  bool ran = false;
  EXPECT_TRUE(loop.post([&] { ran = true; }));
  loop.stop();
  EXPECT_TRUE(ran);
  EXPECT_FALSE(loop.post([] {}));
}

TEST(EventLoopTest, ADescriptorsCallbackRunsOnTheLoopsThread) {
  EventLoop loop("test");
  const SocketPair pair = socket_pair();
  std::promise<bool> called;
  loop.add_fd(pair.second.get(), EPOLLIN, [&](uint32_t) {
    loop.remove_fd(pair.second.get());
    called.set_value(loop.on_thread());
  });
  loop.start();
  EXPECT_FALSE(loop.on_thread());
  write_byte(pair.first.get());
  auto outcome = called.get_future();
  ASSERT_EQ(outcome.wait_for(kLimit), std::future_status::ready);
  EXPECT_TRUE(outcome.get());
}

TEST(EventLoopTest, ACallbackRemovedInTheSameRoundIsNotCalled) {
  EventLoop loop("test");
  const SocketPair a = socket_pair(), b = socket_pair();
  write_byte(a.first.get());
  write_byte(b.first.get());
  int calls = 0;
  const auto remove_both = [&](uint32_t) {
    ++calls;
    loop.remove_fd(a.second.get());
    loop.remove_fd(b.second.get());
  };
  loop.add_fd(a.second.get(), EPOLLIN, remove_both);
  loop.add_fd(b.second.get(), EPOLLIN, remove_both);
  loop.start();
  run_on(loop, [] {});
  run_on(loop, [] {});
  loop.stop();
  EXPECT_EQ(calls, 1);
}

TEST(EventLoopTest, AThrowingDescriptorIsGivenUpAndTheLoopLives) {
  EventLoop loop("test");
  const SocketPair pair = socket_pair();
  std::atomic<int> calls = 0;
  loop.add_fd(pair.second.get(), EPOLLIN, [&](uint32_t) {
    ++calls;
    throw std::runtime_error("on purpose");
  });
  loop.start();
  loop.post([] { throw std::runtime_error("on purpose"); });
  write_byte(pair.first.get());
  run_on(loop, [&] { loop.add_timer(loop.clock().now(), [] { throw std::runtime_error("on purpose"); }); });
  run_on(loop, [] {});
  run_on(loop, [] {});
  EXPECT_LE(calls, 1);
}

TEST(EventLoopTest, TimersRunByDeadlineWhenTheirTimeHasCome) {
  FakeClock clock;
  EventLoop loop("test", clock);
  std::vector<int> order;
  for (const int s : {3, 1, 2}) loop.add_timer_after(seconds(s), [&, s] { order.push_back(s); });
  const EventLoop::TimerId cancelled = loop.add_timer_after(seconds(1), [&] { order.push_back(-1); });
  loop.start();
  run_on(loop, [&] { loop.cancel_timer(cancelled); });
  run_on(loop, [&] { clock.advance(seconds(2)); });
  run_on(loop, [&] { EXPECT_EQ(order, (std::vector{1, 2})); });
  run_on(loop, [&] { clock.advance(seconds(1)); });
  run_on(loop, [&] { EXPECT_EQ(order, (std::vector{1, 2, 3})); });
  loop.stop();
}

TEST(EventLoopTest, ATimerMaySetAnotherForNowWithoutStarvingTheRest) {
  EventLoop loop("test");
  int rounds = 0;
  std::function<void()> again = [&] {
    ++rounds;
    loop.add_timer(loop.clock().now(), again);
  };
  loop.add_timer(loop.clock().now(), again);
  loop.start();
  run_on(loop, [] {});
  run_on(loop, [] {});
  loop.stop();
  EXPECT_GT(rounds, 0);
}

TEST(EventLoopTest, AnIdleLoopUsesNoCpu) {
  EventLoop loop("test");
  const SocketPair pair = socket_pair();
  loop.add_fd(pair.second.get(), EPOLLIN, [](uint32_t) {});
  loop.start();
  timespec before{}, after{};
  clockid_t cpu{};
  run_on(loop, [&] { ASSERT_EQ(pthread_getcpuclockid(pthread_self(), &cpu), 0); });
  ASSERT_EQ(::clock_gettime(cpu, &before), 0);
  EXPECT_FALSE(wait_ready(pair.first.get(), EPOLLIN, Deadline::after(std::chrono::milliseconds(200))));
  ASSERT_EQ(::clock_gettime(cpu, &after), 0);
  EXPECT_LT(Duration(std::chrono::seconds(after.tv_sec - before.tv_sec)).count() + after.tv_nsec - before.tv_nsec,
            20'000'000);
}

}  // namespace
}  // namespace tessera
