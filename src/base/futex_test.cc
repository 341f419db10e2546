#include "base/futex.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <new>

#include "base/testing.h"
#include "base/thread.h"

namespace tessera {
namespace {

void wait_for_value(std::atomic<uint32_t>& word, uint32_t value, const Deadline& deadline) {
  for (uint32_t seen = word.load(); seen != value && !deadline.passed(); seen = word.load())
    futex_wait(word, seen, deadline);
}

TEST(FutexTest, AWordThatHasChangedAlreadyIsNotSleptOn) {
  const std::atomic<uint32_t> word{1};
  const Deadline deadline = soon();
  futex_wait(word, 0, deadline);
  EXPECT_FALSE(deadline.passed());
}

TEST(FutexTest, AWaitEndsAtItsDeadlineAndOneThatHasPassedIsNone) {
  const std::atomic<uint32_t> word{0};
  const Deadline deadline = Deadline::after(std::chrono::milliseconds(2));
  while (!deadline.passed()) futex_wait(word, 0, deadline);
  futex_wait(word, 0, deadline);
  futex_wait(word, 0, Deadline::at(TimePoint::min()));
}

TEST(FutexTest, AThreadIsWoken) {
  std::atomic<uint32_t> word{0};
  const Deadline deadline = soon();
  std::thread sleeper = start_thread("sleeper", [&] { wait_for_value(word, 1, deadline); });
  word = 1;
  futex_wake(word);
  sleeper.join();
  EXPECT_FALSE(deadline.passed());
}

TEST(FutexTest, AnotherProcessIsWoken) {
  void* memory = ::mmap(nullptr, sizeof(uint32_t), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto& word = *new (memory) std::atomic<uint32_t>(0);
  const Deadline deadline = soon();
  const pid_t child = ::fork();
  if (child == 0) {
    wait_for_value(word, 1, deadline);
    word = 2;
    futex_wake(word);
    ::_exit(0);
  }
  word = 1;
  futex_wake(word);
  wait_for_value(word, 2, deadline);
  EXPECT_EQ(word, 2u);
  EXPECT_EQ(::waitpid(child, nullptr, 0), child);
  ::munmap(memory, sizeof(uint32_t));
}

}  // namespace
}  // namespace tessera
