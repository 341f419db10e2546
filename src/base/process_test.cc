#include "base/process.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <cstdlib>
#include <functional>

#include "base/fields_testing.h"
#include "base/socket.h"
#include "base/testing.h"

namespace tessera {
namespace {

// A child that waits to be killed, and its incarnation.
class Child {
 public:
  Child() {
    SocketPair pair = socket_pair();
    pair.second.keep_across_fork();
    pid_ = ::fork();
    if (pid_ == 0) {
      send_some(pair.second.get(), message_bytes(Incarnation::self()));
      while (true) ::pause();
    }
    EXPECT_TRUE(wait_ready(pair.first.get(), POLLIN, Deadline::after(seconds(30))));
    std::vector<std::byte> bytes(4096);
    bytes.resize(receive_some(pair.first.get(), bytes).value_or(0));
    incarnation_ = read_message<Incarnation>(bytes, "incarnation");
  }
  ~Child() { kill(); }

  const Incarnation& incarnation() const { return incarnation_; }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }

 private:
  pid_t pid_ = 0;
  Incarnation incarnation_;
};

TEST(ProcessTest, ThisProcessIsAliveAndItself) {
  const Incarnation self = Incarnation::self();
  EXPECT_EQ(self, Incarnation::self());
  EXPECT_EQ(self.pid, ::getpid());
  EXPECT_GT(self.start_time, 0U);
  EXPECT_EQ(liveness_of(self), Liveness::kAlive);
}

TEST(ProcessTest, TheRestartCountIsToldAndTravels) {
  Incarnation self = Incarnation::self();
  EXPECT_EQ(self.to_string().find("restart"), std::string::npos);
  self.restart = 2;
  EXPECT_NE(self.to_string().find(", restart 2)"), std::string::npos) << self.to_string();
  EXPECT_EQ(read_message<Incarnation>(message_bytes(self), "incarnation"), self);
  EXPECT_TRUE(Incarnation::self().is_superseded_by(self));
  EXPECT_FALSE(self.is_superseded_by(self));
}

TEST(ProcessTest, ComesBackAsItIsDrawn) {
  expect_fields_hold<Incarnation>();
}

TEST(ProcessTest, TorchrunsCountIsPartOfIt) {
  const auto count_in_child = [](const char* said) {
    ::setenv("TORCHELASTIC_RESTART_COUNT", said, 1);
    const Child child;
    ::unsetenv("TORCHELASTIC_RESTART_COUNT");
    return child.incarnation().restart;
  };
  EXPECT_EQ(count_in_child("3"), 3U);
  EXPECT_EQ(count_in_child("three"), 0U);
  EXPECT_EQ(count_in_child(""), 0U);
}

TEST(ProcessTest, AForkedChildIsAnotherIncarnation) {
  const Child child;
  EXPECT_NE(child.incarnation(), Incarnation::self());
  EXPECT_NE(child.incarnation().nonce, Incarnation::self().nonce);
  EXPECT_EQ(liveness_of(child.incarnation()), Liveness::kAlive);
}

TEST(ProcessTest, APidfdTellsOfTheDeath) {
  Child child;
  const UniqueFd fd = open_pidfd(child.incarnation());
  ASSERT_TRUE(fd);
  child.kill();
  EXPECT_TRUE(wait_ready(fd.get(), POLLIN, Deadline::after(seconds(30))));
  EXPECT_EQ(liveness_of(child.incarnation()), Liveness::kDead);
}

TEST(ProcessTest, AReusedPidIsNotTheSameProcess) {
  const Child child;
  Incarnation older = child.incarnation();
  older.start_time -= 1;
  EXPECT_FALSE(open_pidfd(older));
  EXPECT_EQ(liveness_of(older), Liveness::kDead);
}

TEST(ProcessTest, AnotherHostOrNamespaceIsUnknowable) {
  Incarnation elsewhere = Incarnation::self();
  elsewhere.boot_id = "another";
  EXPECT_EQ(liveness_of(elsewhere), Liveness::kUnknowable);
  Incarnation contained = Incarnation::self();
  contained.pid_namespace += 1;
  EXPECT_EQ(liveness_of(contained), Liveness::kUnknowable);
}

// Runs `body` in a forked process.
bool holds_in_a_child(const std::function<bool()>& body) {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(body() ? 0 : 1);
  int status = -1;
  return ::waitpid(pid, &status, 0) == pid && status == 0;
}

TEST(ProcessTest, WhoMayNotLookTakesNobodyForDead) {
  Child child;
  const auto seen_as = [&](Liveness expected) {
    return holds_in_a_child([&] {
      return forbid_system_call(SYS_pidfd_open) && !open_pidfd(child.incarnation()) &&
             liveness_of(child.incarnation()) == expected;
    });
  };
  EXPECT_TRUE(seen_as(Liveness::kUnknowable));
  child.kill();
  EXPECT_TRUE(seen_as(Liveness::kDead));
}

TEST(ProcessTest, AtLeastOneCpuIsUsable) {
  EXPECT_GE(usable_cpus(), 1);
}

}  // namespace
}  // namespace tessera
