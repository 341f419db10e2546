// "auto" among real processes: they start together, hosts are killed, nothing is left behind.
#include "store/auto_host.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "store/test_util.h"

namespace tessera::store {
namespace {

namespace fs = std::filesystem;

// A forked process that obeys lines and answers each with a line. The parent must have no threads.
class Actor {
 public:
  using Script = std::function<std::string(const std::string& line)>;

  explicit Actor(const std::function<Script()>& begin) {
    SocketPair pair = socket_pair();
    pair.second.keep_across_fork();
    pid_ = ::fork();
    if (pid_ != 0) {
      fd_ = std::move(pair.first);
      return;
    }
    Status status = status_of([&] {
      const Script script = begin();
      for (std::string line = read_line(pair.second.get()); line != "end"; line = read_line(pair.second.get())) {
        std::string answer;
        const Status outcome = status_of([&] { answer = script(line); });
        write_line(pair.second.get(), outcome.ok() ? answer : outcome.message());
      }
    });
    ::_exit(status.ok() ? 0 : 1);
  }
  ~Actor() { kill(); }
  Actor(const Actor&) = delete;
  Actor& operator=(const Actor&) = delete;

  void tell(const std::string& line) { write_line(fd_.get(), line); }
  std::string hear() { return read_line(fd_.get()); }
  std::string ask(const std::string& line) {
    tell(line);
    return hear();
  }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(std::exchange(pid_, 0), nullptr, 0);
  }
  // Ends in an orderly way; the exit status.
  int end() {
    tell("end");
    return wait_end();
  }
  int wait_end() {
    int status = -1;
    ::waitpid(std::exchange(pid_, 0), &status, 0);
    return status;
  }

 private:
  static void write_line(int fd, const std::string& line) {
    const std::string text = line + "\n";
    send_some(fd, std::as_bytes(std::span(text)));
  }
  static std::string read_line(int fd) {
    std::string line;
    for (std::array<std::byte, 1> one; wait_ready(fd, POLLIN, Deadline::after(kLimit));) {
      if (receive_some(fd, one).value_or(0) == 0) fail(ErrorCode::kPeerLost, "the actor has ended");
      if (static_cast<char>(one[0]) == '\n') return line;
      line += static_cast<char>(one[0]);
    }
    fail(ErrorCode::kDeadlineExceeded, "no line came");
  }

  pid_t pid_ = 0;
  UniqueFd fd_;
};

// What an actor does with its store: "put K V", "own K V" (under a lease), "decide K V" (if absent), "get K",
// "revision K", "wait PREFIX N".
Actor::Script store_script(const std::string& root) {
  std::shared_ptr<Store> store = open_store("auto", {.runtime_dir = root, .connect_timeout = kLimit});
  const auto lease = std::make_shared<LeaseId>(kNoLease);
  return [store, lease](const std::string& line) -> std::string {
    std::istringstream in(line);
    std::string verb, key, value;
    in >> verb >> key >> value;
    if (verb == "put") return store->put(key, value, {}, kLimit), "ok";
    if (verb == "own") {
      if (*lease == kNoLease) *lease = store->grant_lease(std::chrono::minutes(10), kLimit);
      return store->put(key, value, {.lease = *lease}, kLimit), "ok";
    }
    if (verb == "decide") return store->put_if_absent(key, value, {.decision = true}, kLimit).current.value;
    if (verb == "wait")
      return store->wait_for(
                 key, [&](const StoreView& view) { return view.size() >= std::stoul(value); }, kLimit),
             "ok";
    const auto kv = store->get(key, kLimit);
    if (!kv) return "nothing";
    return verb == "revision" ? std::to_string(kv->mod_revision) : kv->value;
  };
}

class AutoHostTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = "/tmp/tessera-test-XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    root_ = name;
  }
  void TearDown() override { fs::remove_all(root_); }

  std::unique_ptr<Actor> actor() {
    return std::make_unique<Actor>([this] { return store_script(root_); });
  }
  // What the runtime folder still holds.
  std::vector<std::string> leftovers() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(root_)) names.push_back(entry.path().filename().string());
    return names;
  }

  std::string root_;
};

TEST_F(AutoHostTest, ProcessesThatStartTogetherFindEachOther) {
  constexpr int kActors = 6;
  for (int round = 0; round < 3; ++round) {
    std::vector<std::unique_ptr<Actor>> actors;
    for (int i = 0; i < kActors; ++i) actors.push_back(actor());
    for (int i = 0; i < kActors; ++i) actors[static_cast<size_t>(i)]->tell(fmt::format("own rank/{} in", i));
    for (const auto& one : actors) EXPECT_EQ(one->hear(), "ok");
    for (const auto& one : actors) EXPECT_EQ(one->ask(fmt::format("wait rank/ {}", kActors)), "ok");
    for (const auto& one : actors) EXPECT_EQ(one->end(), 0);
    EXPECT_THAT(leftovers(), testing::IsEmpty());
  }
}

TEST_F(AutoHostTest, ProcessesThatEndTogetherLeaveNothing) {
  constexpr int kActors = 6;
  for (int round = 0; round < 20; ++round) {
    std::vector<std::unique_ptr<Actor>> actors;
    for (int i = 0; i < kActors; ++i) actors.push_back(actor());
    for (const auto& one : actors) EXPECT_EQ(one->ask("own key here"), "ok");
    for (const auto& one : actors) one->tell("end");
    for (const auto& one : actors) EXPECT_EQ(one->wait_end(), 0);
    ASSERT_THAT(leftovers(), testing::IsEmpty()) << "round " << round;
  }
}

TEST_F(AutoHostTest, WhenTheHostIsKilledAnotherTakesOverAndNothingDecidedIsLost) {
  const auto host = actor();
  EXPECT_EQ(host->ask("own host/key here"), "ok");  // it was alone: it hosts
  const auto second = actor();
  const auto third = actor();
  EXPECT_EQ(second->ask("own second/key here"), "ok");
  EXPECT_EQ(third->ask("own third/key here"), "ok");
  EXPECT_EQ(host->ask("decide epoch/1 commit"), "commit");
  EXPECT_EQ(second->ask("get epoch/1"), "commit");
  const std::string revision = second->ask("revision epoch/1");

  third->tell("wait signal/ 1");
  host->kill();
  EXPECT_EQ(second->ask("put signal/a go"), "ok");
  EXPECT_EQ(third->hear(), "ok");
  EXPECT_EQ(third->ask("get epoch/1"), "commit");
  EXPECT_EQ(third->ask("revision epoch/1"), revision);
  EXPECT_EQ(third->ask("decide epoch/1 abort"), "commit");
  EXPECT_EQ(third->ask("get second/key"), "here");
  EXPECT_EQ(second->ask("get third/key"), "here");
  EXPECT_EQ(second->ask("get host/key"), "nothing");
  EXPECT_GT(std::stoll(second->ask("revision signal/a")), std::stoll(revision));
  EXPECT_EQ(second->end(), 0);
  EXPECT_EQ(third->end(), 0);
  EXPECT_THAT(leftovers(), testing::IsEmpty());
}

TEST_F(AutoHostTest, HostAfterHostMayBeKilledAndRevisionsGrow) {
  constexpr int kActors = 5;
  std::vector<std::unique_ptr<Actor>> actors;
  for (int i = 0; i < kActors; ++i) {
    actors.push_back(actor());
    EXPECT_EQ(actors.back()->ask(fmt::format("own rank/{} in", i)), "ok");
  }
  int64_t last = std::stoll(actors[0]->ask("revision rank/0"));
  const auto survivor = std::move(actors.back());
  actors.pop_back();
  for (const auto& killed : actors) {  // the host among them, sooner or later
    killed->kill();
    EXPECT_EQ(survivor->ask("put tick now"), "ok");
    const int64_t revision = std::stoll(survivor->ask("revision tick"));
    EXPECT_GT(revision, last);
    last = revision;
    EXPECT_EQ(survivor->ask(fmt::format("get rank/{}", kActors - 1)), "in");
  }
  EXPECT_EQ(survivor->end(), 0);
  EXPECT_THAT(leftovers(), testing::IsEmpty());
}

TEST_F(AutoHostTest, AHostThatLeavesInOrderHandsOver) {
  const auto host = actor();
  EXPECT_EQ(host->ask("decide epoch/1 commit"), "commit");
  const auto other = actor();
  EXPECT_EQ(other->ask("own other/key here"), "ok");
  EXPECT_EQ(other->ask("get epoch/1"), "commit");
  EXPECT_EQ(host->end(), 0);
  EXPECT_EQ(other->ask("get epoch/1"), "commit");
  EXPECT_EQ(other->ask("get other/key"), "here");
  const auto newcomer = actor();
  EXPECT_EQ(newcomer->ask("get epoch/1"), "commit");
  EXPECT_EQ(newcomer->end(), 0);
  EXPECT_EQ(other->end(), 0);
  EXPECT_THAT(leftovers(), testing::IsEmpty());
}

TEST_F(AutoHostTest, WhatAKilledHostLeftDoesNotDelayTheNextJob) {
  {
    const auto alone = actor();
    EXPECT_EQ(alone->ask("put a 1"), "ok");
    alone->kill();
  }
  EXPECT_THAT(leftovers(), testing::Not(testing::IsEmpty()));
  const auto next = actor();
  EXPECT_EQ(next->ask("get a"), "nothing");
  EXPECT_EQ(next->end(), 0);
  EXPECT_THAT(leftovers(), testing::IsEmpty());
}

TEST_F(AutoHostTest, ANewcomerThatTakesTheLockFirstStillHearsTheOthers) {
  // A stranger, not one of the old clients, becomes the host: it finds in store.members whom to wait for.
  const auto host = actor();
  EXPECT_EQ(host->ask("decide epoch/1 commit"), "commit");
  const auto witness = actor();
  EXPECT_EQ(witness->ask("get epoch/1"), "commit");
  host->kill();
  const auto newcomer = actor();
  EXPECT_EQ(newcomer->ask("decide epoch/1 abort"), "commit");
  EXPECT_EQ(newcomer->end(), 0);
  EXPECT_EQ(witness->end(), 0);
}

TEST_F(AutoHostTest, ADamagedMembersFileIsReplaced) {
  {
    const UniqueFd fd(::open((root_ + "/store.members").c_str(), O_WRONLY | O_CREAT, 0600));
    ASSERT_EQ(::write(fd.get(), "garbage", 7), 7);
  }
  const auto next = actor();
  EXPECT_EQ(next->ask("put a 1"), "ok");
  EXPECT_EQ(next->end(), 0);
  EXPECT_THAT(leftovers(), testing::IsEmpty());
}

}  // namespace
}  // namespace tessera::store
