#include "base/runtime_dir.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <array>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <thread>

#include "base/fail.h"
#include "base/socket.h"
#include "base/testing.h"
#include "base/thread.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class RuntimeDirTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = "/tmp/tessera-test-XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    parent_ = name;
    root_ = parent_ + "/run";
  }
  void TearDown() override { fs::remove_all(parent_); }

  size_t entries() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(root_), fs::directory_iterator()));
  }
  std::string error_of_open() const {
    try {
      RuntimeDir::open(root_);
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  }

  std::string parent_, root_;
};

TEST_F(RuntimeDirTest, AFolderOfOurOwnLivesAsLongAsTheObject) {
  {
    const RuntimeDir dir = RuntimeDir::open(root_ + "/");
    EXPECT_EQ(dir.root(), root_);
    struct stat status{};
    ASSERT_EQ(::stat(root_.c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, 0700U);
    EXPECT_TRUE(fs::exists(dir.own() + "/lock"));
    const UniqueFd socket = listen_unix(dir.path("agent.sock"));
    EXPECT_EQ(entries(), 1U);
  }
  EXPECT_EQ(entries(), 0U);
}

// A process killed while it removes its folder leaves one that the next start can recognise and remove.
TEST_F(RuntimeDirTest, AFoldersLockIsRemovedLast) {
  std::optional<RuntimeDir> dir = RuntimeDir::open(root_);
  for (const char* name : {"agent", "k", "zzz", "0"}) std::ofstream(dir->path(name)) << "x";
  fs::create_directory(dir->path("deeper"));
  const UniqueFd watch(::inotify_init1(IN_CLOEXEC | IN_NONBLOCK));
  ASSERT_GE(::inotify_add_watch(watch.get(), dir->own().c_str(), IN_DELETE), 0);
  dir.reset();
  std::array<char, 4096> buffer{};
  const ssize_t got = ::read(watch.get(), buffer.data(), buffer.size());
  std::vector<std::string> removed;
  for (ssize_t at = 0; at < got;) {
    inotify_event event{};
    std::memcpy(&event, buffer.data() + at, sizeof(event));
    if (event.len > 0) removed.emplace_back(buffer.data() + at + sizeof(event));
    at += static_cast<ssize_t>(sizeof(event) + event.len);
  }
  EXPECT_EQ(removed.size(), 7U);
  ASSERT_FALSE(removed.empty());
  EXPECT_EQ(removed.back(), "lock");
  EXPECT_EQ(entries(), 0U);
}

TEST_F(RuntimeDirTest, LeftoversOfAKilledProcessGoAndLivingOnesStay) {
  const RuntimeDir living = RuntimeDir::open(root_);
  SocketPair pair = socket_pair();
  pair.second.keep_across_fork();
  const pid_t child = ::fork();
  if (child == 0) {
    const RuntimeDir dir = RuntimeDir::open(root_);
    std::ofstream(dir.path("leftover")) << "x";
    send_some(pair.second.get(), std::as_bytes(std::span(std::string_view("!"))));
    while (true) ::pause();
  }
  ASSERT_TRUE(wait_ready(pair.first.get(), POLLIN, Deadline::after(seconds(60))));
  EXPECT_EQ(entries(), 2U);
  RuntimeDir::prepare_root(root_);
  EXPECT_EQ(entries(), 2U) << "a living process' folder was removed";
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  RuntimeDir::prepare_root(root_);
  EXPECT_EQ(entries(), 1U);
  EXPECT_TRUE(fs::exists(living.own()));
}

TEST_F(RuntimeDirTest, OnlyTheLockTellsTheLivingFromTheDeadWhateverTheNoteSays) {
  const RuntimeDir living = RuntimeDir::open(root_);
  for (const char* note : {"pid 999999999\n", "pid 1\ncommand init\n", "", "pid -5\nrole", "\xff\xfe"}) {
    std::ofstream(living.path("owner")) << note;
    const fs::path dead = fs::path(root_) / "p-0123456789abcdef";
    fs::create_directory(dead);
    std::ofstream(dead / "lock") << "";
    std::ofstream(dead / "owner") << "pid " << ::getpid() << "\n";  // its pid has been reused: by us
    const std::vector<ProcessFolder> folders = RuntimeDir::folders(root_);
    ASSERT_EQ(folders.size(), 2U);
    EXPECT_EQ(folders[0].living, folders[0].path == living.own());
    EXPECT_EQ(folders[1].living, folders[1].path == living.own());
    RuntimeDir::prepare_root(root_);
    EXPECT_FALSE(fs::exists(dead)) << note;
    EXPECT_TRUE(fs::exists(living.path("lock"))) << note;
  }
}

TEST_F(RuntimeDirTest, AFolderSaysWhoseItIs) {
  EXPECT_TRUE(RuntimeDir::folders(root_).empty());
  EXPECT_FALSE(fs::exists(root_)) << "to look makes nothing";
  const RuntimeDir dir = RuntimeDir::open(root_, "trainer/3\n");
  const std::vector<ProcessFolder> folders = RuntimeDir::folders(root_ + "/");
  ASSERT_EQ(folders.size(), 1U);
  EXPECT_EQ(folders[0].path, dir.own());
  EXPECT_TRUE(folders[0].living);
  EXPECT_EQ(folders[0].pid, ::getpid());
  EXPECT_THAT(folders[0].command, HasSubstr("base_test"));
  EXPECT_EQ(folders[0].role, "trainer/3");
  EXPECT_GT(folders[0].since, 0);
}

TEST_F(RuntimeDirTest, ManyThatStartTogetherEachKeepTheirs) {
  constexpr int kThreads = 8, kRounds = 25;
  std::atomic<int> lost = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&] {
      for (int round = 0; round < kRounds; ++round) {
        const RuntimeDir dir = RuntimeDir::open(root_);
        RuntimeDir::folders(root_);  // listing disturbs nobody
        if (!fs::exists(dir.own() + "/lock")) ++lost;
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(lost, 0);
  EXPECT_EQ(entries(), 0U);
}

TEST_F(RuntimeDirTest, AnUnsafeRootIsRefusedWithTheVariablesName) {
  ASSERT_EQ(::mkdir(root_.c_str(), 0700), 0);
  ASSERT_EQ(::chmod(root_.c_str(), 0755), 0);
  EXPECT_THAT(error_of_open(), HasSubstr("open to other users"));
  EXPECT_THAT(error_of_open(), HasSubstr("TESSERA_RUNTIME_DIR"));
  fs::remove(root_);
  fs::create_directory_symlink(parent_, root_);
  EXPECT_THAT(error_of_open(), HasSubstr("symbolic link"));
  fs::remove(root_);
  std::ofstream(root_) << "a file";
  EXPECT_THAT(error_of_open(), HasSubstr("is not a folder"));
}

TEST_F(RuntimeDirTest, AnotherUsersRootIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a folder away";
  ASSERT_EQ(::mkdir(root_.c_str(), 0700), 0);
  ASSERT_EQ(::chown(root_.c_str(), 65534, 65534), 0);
  EXPECT_THAT(error_of_open(), HasSubstr("belongs to another user"));
  EXPECT_THAT(error_of([&] { RuntimeDir::folders(root_); }), HasSubstr("belongs to another user"));
}

TEST_F(RuntimeDirTest, ARootTooLongForASocketIsRefusedAtOnce) {
  root_ = parent_ + "/" + std::string(80, 'r');
  EXPECT_THAT(error_of_open(), HasSubstr("TESSERA_RUNTIME_DIR"));
  EXPECT_FALSE(fs::exists(root_));
}

TEST_F(RuntimeDirTest, NamesAreShortAndPlain) {
  const RuntimeDir dir = RuntimeDir::open(root_);
  EXPECT_EQ(dir.path("a"), dir.own() + "/a");
  for (const std::string& name : {std::string(), std::string("../x"), std::string(RuntimeDir::kMaxNameBytes + 1, 'n')})
    EXPECT_THROW(dir.path(name), Error) << name;
}

}  // namespace
}  // namespace tessera
