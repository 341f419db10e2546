#include "base/fd.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "base/event_loop.h"
#include "base/socket.h"
#include "base/testing.h"

namespace tessera {
namespace {

bool is_open(int fd) {
  return ::fcntl(fd, F_GETFD) >= 0;
}

// Runs `body` in a forked child and returns its exit status.
int in_child(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body());
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// A forked child that does nothing until it is killed.
class IdleChild {
 public:
  IdleChild() : pid_(::fork()) {
    while (pid_ == 0) ::pause();
  }
  ~IdleChild() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  IdleChild(const IdleChild&) = delete;
  IdleChild& operator=(const IdleChild&) = delete;

  bool alive() const { return ::waitpid(pid_, nullptr, WNOHANG) == 0; }

 private:
  pid_t pid_;
};

TEST(UniqueFd, OwnsAndGivesAway) {
  UniqueFd fd(::dup(STDIN_FILENO));
  const int number = fd.get();
  ASSERT_TRUE(is_open(number));
  UniqueFd moved(std::move(fd));
  EXPECT_FALSE(fd);  // NOLINT(bugprone-use-after-move): that is the claim
  EXPECT_EQ(moved.get(), number);
  EXPECT_EQ(moved.release(), number);
  EXPECT_FALSE(moved);
  EXPECT_TRUE(is_open(number));
  moved.reset(number);
  moved.reset();
  EXPECT_FALSE(is_open(number));
}

TEST(UniqueFdFork, APeerSeesTheEndThoughAChildLivesOn) {
  SocketPair pair = socket_pair();
  const IdleChild child;
  pair.first.reset();
  ASSERT_TRUE(wait_ready(pair.second.get(), POLLIN, soon()));
  std::vector<std::byte> bytes(1);
  EXPECT_EQ(receive_some(pair.second.get(), bytes), 0U);
  EXPECT_TRUE(child.alive());
}

TEST(UniqueFdFork, AChildFindsNoneOfAllThatWasOwned) {
  std::vector<UniqueFd> owned;
  for (int i = 0; i < 150; ++i) owned.emplace_back(::dup(STDIN_FILENO));
  const EventLoop loop("loop");
  UniqueFd moved = std::move(owned[70]);
  std::vector<int> numbers{moved.get()};
  for (const UniqueFd& fd : owned)
    if (fd) numbers.push_back(fd.get());
  ASSERT_EQ(numbers.size(), 150U);
  EXPECT_EQ(in_child([&] {
              for (const int number : numbers)
                if (is_open(number)) return 1;
              return moved || owned[0] || moved.get() != -1 || moved.release() != -1 ? 2 : 0;
            }),
            0);
  for (const int number : numbers) EXPECT_TRUE(is_open(number)) << number;
}

TEST(UniqueFdFork, AnInheritedObjectLeavesTheChildsOwnDescriptorAlone) {
  std::optional<UniqueFd> inherited(::dup(STDIN_FILENO));
  const int number = inherited->get();
  EXPECT_EQ(in_child([&] {
              const int raw = ::dup(STDIN_FILENO);  // the lowest number that is free
              if (raw != number) return 1;
              inherited.reset();
              if (!is_open(number)) return 2;
              ::close(raw);
              return 0;
            }),
            0);
  EXPECT_EQ(in_child([&] {
              const UniqueFd own(::dup(STDIN_FILENO));
              if (own.get() != number) return 1;
              inherited.reset();
              if (!is_open(number) || own.get() != number) return 2;
              // A child closes its own descriptors in its own child, too.
              return in_child([&] { return is_open(number) || own ? 3 : 0; });
            }),
            0);
  EXPECT_TRUE(is_open(number));
}

TEST(UniqueFdFork, OneThatIsKeptIsTheChildsToo) {
  UniqueFd kept(::dup(STDIN_FILENO));
  kept.keep_across_fork();
  UniqueFd moved = std::move(kept);
  const int number = moved.get();
  EXPECT_EQ(in_child([&] {
              if (moved.get() != number || !is_open(number)) return 1;
              moved.reset();
              return is_open(number) ? 2 : 0;
            }),
            0);
  EXPECT_TRUE(is_open(number));
  moved.reset();
  EXPECT_FALSE(is_open(number));
}

TEST(UniqueFdFork, OneThatWasReleasedIsInheritedAsAnyOther) {
  UniqueFd fd(::dup(STDIN_FILENO));
  const int number = fd.release();
  EXPECT_EQ(in_child([&] { return is_open(number) ? 0 : 1; }), 0);
  ::close(number);
}

// The child inherits no lock that a thread of its parent holds or waits for: it can open and close descriptors, and
// fork.
TEST(UniqueFdFork, ThreadsThatOpenAndCloseMeanwhileLeaveTheChildNoLock) {
  std::atomic<bool> stop = false;
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t)
    threads.emplace_back([&] {
      while (!stop) {
        const UniqueFd fd(::eventfd(0, EFD_CLOEXEC));
        ASSERT_TRUE(fd);
      }
    });
  for (int round = 0; round < 50; ++round)
    EXPECT_EQ(in_child([] {
                UniqueFd own(::dup(STDIN_FILENO));
                own.reset();
                return in_child([] { return UniqueFd(::dup(STDIN_FILENO)) ? 0 : 1; });
              }),
              0);
  stop = true;
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace tessera
