#include "base/file_lock.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <future>
#include <string>
#include <thread>

#include "base/process.h"
#include "base/testing.h"

namespace tessera {
namespace {

class FileLockTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = "/tmp/tessera-test-XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
    path_ = folder_ + "/lock";
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  // A process that holds the lock until it is killed.
  pid_t start_holder() const {
    int ready[2];
    EXPECT_EQ(::pipe(ready), 0);
    const pid_t holder = ::fork();
    if (holder == 0) {
      const UniqueFd lock = try_lock_file(path_);
      (void)!::write(ready[1], lock ? "y" : "n", 1);
      while (true) ::pause();
    }
    char said = 0;
    EXPECT_EQ(::read(ready[0], &said, 1), 1);
    EXPECT_EQ(said, 'y');
    ::close(ready[0]);
    ::close(ready[1]);
    return holder;
  }

  std::string folder_, path_;
};

// The threads of this process.
size_t threads() {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator("/proc/self/task"), {}));
}

TEST_F(FileLockTest, ItIsHeldByOneAndEndsWithItsDescriptor) {
  UniqueFd first = try_lock_file(path_);
  ASSERT_TRUE(first);
  EXPECT_TRUE(is_lock_held(path_));
  EXPECT_FALSE(try_lock_file(path_));
  EXPECT_FALSE(lock_file(path_, Deadline::after(Duration::zero())));
  std::future<bool> second =
      std::async(std::launch::async, [&] { return static_cast<bool>(lock_file(path_, soon())); });
  first.reset();
  EXPECT_TRUE(second.get());
  EXPECT_FALSE(is_lock_held(path_));
}

TEST_F(FileLockTest, AWaitEndsAtItsDeadlineAndLeavesNothingBehind) {
  const UniqueFd first = try_lock_file(path_);
  std::thread([] {}).join();  // a sanitizer starts its own thread together with the first
  const size_t before = threads();
  const Deadline deadline = Deadline::after(seconds(0.02));
  EXPECT_FALSE(lock_file(path_, deadline));
  EXPECT_TRUE(deadline.passed());
  // The kernel forgets a thread shortly after it is joined.
  for (const Deadline limit = soon(); threads() > before && !limit.passed();) std::this_thread::yield();
  EXPECT_EQ(threads(), before);
}

TEST_F(FileLockTest, AWaitThatNeverEndsIsEndedByTheHoldersDeath) {
  const pid_t holder = start_holder();
  std::future<bool> waits = std::async(
      std::launch::async, [&] { return static_cast<bool>(lock_file(path_, Deadline::after(Duration::max()))); });
  EXPECT_FALSE(lock_file(path_, Deadline::after(seconds(0.01))));
  ASSERT_EQ(::kill(holder, SIGKILL), 0);
  ASSERT_EQ(::waitpid(holder, nullptr, 0), holder);
  EXPECT_TRUE(waits.get());
}

TEST_F(FileLockTest, WhoeverWaitsForAFileThatItsHolderRemovesGetsTheNextOne) {
  UniqueFd first = try_lock_file(path_);
  std::future<UniqueFd> second = std::async(std::launch::async, [&] { return lock_file(path_, soon()); });
  std::filesystem::remove(path_);
  first.reset();
  const UniqueFd held = second.get();
  ASSERT_TRUE(held);
  EXPECT_TRUE(same_file(held.get(), path_));
}

TEST_F(FileLockTest, AFolderThatHasGoneIsNotWaitedFor) {
  std::filesystem::remove_all(folder_);
  EXPECT_FALSE(lock_file(path_, Deadline::after(Duration::max())));
  EXPECT_FALSE(is_lock_held(path_));
}

TEST_F(FileLockTest, AnEndIsAwaitedUntilTheDeadline) {
  const pid_t holder = start_holder();
  Incarnation process = Incarnation::self();
  process.pid = holder;
  process.start_time = 0;
  EXPECT_TRUE(await_end(process, soon())) << "the pid is another's";
  EXPECT_FALSE(await_end(Incarnation::self(), Deadline::after(seconds(0.01))));
  ASSERT_EQ(::kill(holder, SIGKILL), 0);
  ASSERT_EQ(::waitpid(holder, nullptr, 0), holder);
}

}  // namespace
}  // namespace tessera
