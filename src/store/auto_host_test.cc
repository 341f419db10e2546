// "auto" with real processes: they start together, hosts are killed, and no files remain.
#include "store/auto_host.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include <cstdlib>
#include <filesystem>

#include "base/testing.h"
#include "store/test_actor.h"

namespace tessera::store {
namespace {

namespace fs = std::filesystem;

class AutoHostTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = "/tmp/tessera-test-XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    root_ = name;
  }
  void TearDown() override { fs::remove_all(root_); }

  std::unique_ptr<Actor> actor() {
    return std::make_unique<Actor>([this] { return store_script("auto", root_); });
  }
  // The files that remain in the runtime folder.
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
  EXPECT_EQ(host->ask("own host/key here"), "ok");  // there was no other: it hosts
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
  // A new process, not one of the old clients, becomes the host: store.members tells it which clients to wait for.
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

// A host that ends in each of these states ends cleanly, and the next one serves the clients that remain.
struct Obstacle {
  const char* name;
  bool lasts;  // for later processes, too
  std::string (*meet)(const std::string& root);
};

class AutoHostObstacleTest : public AutoHostTest, public testing::WithParamInterface<Obstacle> {};

TEST_P(AutoHostObstacleTest, AHostThatCannotWaitForItsTurnEndsInOrder) {
  const auto host = std::make_unique<Actor>([this]() -> Actor::Script {
    return [this, script = store_script("auto", root_)](const std::string& line) {
      return line == "meet the obstacle" ? GetParam().meet(root_) : script(line);
    };
  });
  EXPECT_EQ(host->ask("own host/key here"), "ok");
  const auto client = actor();
  EXPECT_EQ(client->ask("own client/key here"), "ok");
  EXPECT_EQ(host->ask("meet the obstacle"), "ok");
  EXPECT_EQ(host->end(), 0);
  EXPECT_EQ(client->ask("get client/key"), "here");
  EXPECT_EQ(client->ask("get host/key"), "nothing");
  EXPECT_EQ(client->end(), 0);
  if (!GetParam().lasts) {
    EXPECT_THAT(leftovers(), testing::IsEmpty());
  }
}

INSTANTIATE_TEST_SUITE_P(All, AutoHostObstacleTest,
                         testing::Values(Obstacle{"DescriptorLimit", false,
                                                  [](const std::string&) -> std::string {
                                                    const UniqueFd next(::dup(STDERR_FILENO));
                                                    const rlimit full{.rlim_cur = static_cast<rlim_t>(next.get()),
                                                                      .rlim_max = static_cast<rlim_t>(next.get())};
                                                    return ::setrlimit(RLIMIT_NOFILE, &full) == 0 ? "ok" : "no limit";
                                                  }},
                                         Obstacle{"Link", true,
                                                  [](const std::string& root) -> std::string {
                                                    fs::create_symlink("/nonexistent", root + "/store.leaving");
                                                    return "ok";
                                                  }},
                                         Obstacle{"ReadOnlyFolder", false,
                                                  [](const std::string&) -> std::string {
                                                    return forbid_system_call(SYS_openat, EROFS) ? "ok"
                                                                                                 : "not forbidden";
                                                  }},
                                         Obstacle{"FullFolder", false,
                                                  [](const std::string&) -> std::string {
                                                    return forbid_system_call(SYS_openat, ENOSPC) ? "ok"
                                                                                                  : "not forbidden";
                                                  }}),
                         [](const auto& named) { return std::string(named.param.name); });

}  // namespace
}  // namespace tessera::store
