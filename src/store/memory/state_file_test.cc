#include "store/memory/state_file.h"

#include <sched.h>
#include <signal.h>
#include <sqlite3.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <random>

#include "base/testing.h"
#include "store/test_util.h"

namespace tessera::store {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::SizeIs;

StoreOperation put_of(std::string key, std::string value, PutOptions options = {}) {
  return {.type = StoreOperation::Type::kPut, .key = std::move(key), .value = std::move(value), .options = options};
}
StoreTransaction only(StoreOperation operation) {
  return {.compares = {}, .operations = {std::move(operation)}};
}

std::vector<KeyValue> keys_of(const State& state) {
  std::vector<KeyValue> keys;
  for (const Record& record : state.find_prefix("")) keys.push_back(*record);
  return keys;
}

// A state that is kept in a folder, as in a server.
struct Kept {
  explicit Kept(const std::string& folder, TimePoint now = {}) : file(folder) {
    file.load(state, now);
    state.set_keeper([this](const Change& change) { file.keep(change); });
  }
  StateFile file;
  State state{State::Limits{}};
};

class StateFileTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = "/tmp/tessera-test-XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    parent_ = name;
    folder_ = parent_ + "/store";
  }
  void TearDown() override { fs::remove_all(parent_); }

  void change_database(const char* sql) const {
    sqlite3* database = nullptr;
    ASSERT_EQ(::sqlite3_open((folder_ + "/store.db").c_str(), &database), SQLITE_OK);
    EXPECT_EQ(::sqlite3_exec(database, sql, nullptr, nullptr, nullptr), SQLITE_OK) << ::sqlite3_errmsg(database);
    ::sqlite3_close(database);
  }
  // Writes pairs "a/N", "b/N" as one change each, in a process that is killed once `count` are answered.
  // It makes no change beyond `most`.
  void write_pairs_and_die(int count, int most = std::numeric_limits<int>::max()) const {
    SocketPair pair = socket_pair();
    pair.second.keep_across_fork();
    const pid_t child = ::fork();
    if (child == 0) {
      Kept kept(folder_);
      for (int n = 1; n <= most; ++n) {
        kept.state.transact({.compares = {},
                             .operations = {put_of(fmt::format("a/{:06}", n), std::string(300, 'a')),
                                            put_of(fmt::format("b/{:06}", n), std::to_string(n))}});
        send_some(pair.second.get(), std::as_bytes(std::span(std::string_view("!"))));
      }
      while (true) ::pause();
    }
    std::array<std::byte, 1> one;
    for (int answered = 0; answered < count;)
      if (wait_ready(pair.first.get(), POLLIN, soon()) && receive_some(pair.first.get(), one)) ++answered;
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
  }
  // The number of pairs, after a check that they are the first ones and complete.
  int whole_pairs() const {
    const Kept kept(folder_);
    const auto first = kept.state.find_prefix("a/"), second = kept.state.find_prefix("b/");
    EXPECT_EQ(first.size(), second.size());
    for (size_t i = 0; i < std::min(first.size(), second.size()); ++i) {
      EXPECT_EQ(first[i]->key, fmt::format("a/{:06}", i + 1));
      EXPECT_EQ(second[i]->value, std::to_string(i + 1));
      EXPECT_EQ(first[i]->mod_revision, second[i]->mod_revision);
    }
    return static_cast<int>(first.size());
  }

  std::string parent_, folder_;
};

TEST_F(StateFileTest, KeysDecisionsAndLeasesComeBackAndWhatHasGoneDoesNot) {
  const std::string binary("\0\xff v", 4);
  std::vector<KeyValue> before;
  int64_t revision = 0;
  {
    Kept kept(folder_);
    EXPECT_EQ(kept.state.revision(), 0) << "a new store begins at the beginning";
    kept.state.grant(7, seconds(5), {});
    kept.state.grant(8, seconds(5), {});
    kept.state.transact(only(put_of("plain", binary)));
    kept.state.transact(only(put_of("plain", "")));
    kept.state.transact(only(put_of("leased", "v", {.lease = 7})));
    kept.state.transact(only(put_of("with lease 8", "v", {.lease = 8})));
    kept.state.transact(only(put_of("decided", binary, {.decision = true})));
    kept.state.transact(only(put_of("erased", "v")));
    kept.state.erase("erased");
    kept.state.revoke(8);
    before = keys_of(kept.state);
    revision = kept.state.revision();
    ASSERT_THAT(before, SizeIs(3));
  }
  const TimePoint now{std::chrono::hours(50)};
  Kept kept(folder_, now);
  EXPECT_EQ(keys_of(kept.state), before);
  EXPECT_GT(kept.state.revision(), revision);
  EXPECT_EQ(kept.state.compacted(), kept.state.revision());
  ASSERT_EQ(kept.state.next_expiry(), now + seconds(5)) << "the full ttl again";
  kept.state.expire(now + seconds(5));
  EXPECT_EQ(kept.state.find("leased"), nullptr);
  EXPECT_NE(kept.state.find("plain"), nullptr);
}

TEST_F(StateFileTest, WhatAClientPublishesAgainReplacesOnlyWhatIsOlder) {
  const KeyValue later{
      .key = "k", .value = "later", .create_revision = 1, .mod_revision = 9, .version = 3, .decision = true};
  {
    Kept kept(folder_);
    kept.state.transact(only(put_of("k", "kept", {.decision = true})));
  }
  Kept kept(folder_);
  KeyValue earlier = later;
  earlier.mod_revision = 1;
  kept.state.restore(earlier, false);
  EXPECT_EQ(kept.state.find("k")->value, "kept");
  kept.state.restore(later, false);  // it was answered, but a power loss has undone it
  EXPECT_EQ(kept.state.find("k")->value, "later");
}

TEST_F(StateFileTest, AnySequenceOfChangesIsReadBackAsItStood) {
  std::mt19937 random(11);
  const auto below = [&](uint32_t end) { return static_cast<int>(random() % end); };
  auto kept = std::make_unique<Kept>(folder_);
  for (int step = 0; step < 400; ++step) {
    const std::string key = fmt::format("k{}", below(12));
    const LeaseId lease = 1 + below(3);
    switch (below(8)) {
      case 0:
        kept->state.erase(key);
        break;
      case 1:
        kept->state.erase_prefix("k1");
        break;
      case 2:
        kept->state.revoke(lease);
        break;
      case 3: {
        const std::vector<KeyValue> before = keys_of(kept->state);
        kept.reset();
        kept = std::make_unique<Kept>(folder_);
        ASSERT_EQ(keys_of(kept->state), before) << "step " << step;
        break;
      }
      default:
        kept->state.grant(lease, seconds(60), {});
        kept->state.transact(only(put_of(key, std::to_string(step), {.lease = below(2) == 0 ? lease : kNoLease})));
    }
  }
}

TEST_F(StateFileTest, AKillAtAnyPointLosesNothingAnsweredAndHalvesNothing) {
  std::mt19937 random(3);
  for (int round = 0; round < 12; ++round) {
    fs::remove_all(folder_);
    const int answered = 1 + static_cast<int>(random() % 60);
    write_pairs_and_die(answered);
    const int found = whole_pairs();
    EXPECT_GE(found, answered);
    EXPECT_EQ(whole_pairs(), found) << "the second time";
  }
}

TEST_F(StateFileTest, ADamagedTailIsCut) {
  write_pairs_and_die(12, 12);
  const std::string log = folder_ + "/store.db-wal", copy = parent_ + "/copy";
  fs::copy(folder_, copy);
  const auto size = static_cast<int64_t>(fs::file_size(log));
  int last = whole_pairs();
  EXPECT_EQ(last, 12);
  for (int64_t cut = 1; cut < size; cut += size / 9) {
    for (const bool truncate : {true, false}) {
      fs::remove_all(folder_);
      fs::copy(copy, folder_);
      if (truncate) {
        fs::resize_file(log, static_cast<uint64_t>(size - cut));
      } else {
        std::fstream file(log, std::ios::in | std::ios::out | std::ios::binary);
        file.seekp(size - cut);
        file.put('\x5a');
      }
      const int found = whole_pairs();
      EXPECT_LE(found, last);
      if (truncate) last = found;
    }
  }
  EXPECT_LT(last, 12) << "no cut reached a change";
}

// In a child: a disk that is almost full, until `relieve` is called.
void live_on_a_full_disk(const std::string& folder, const std::string& expected, const std::function<void()>& fill,
                         const std::function<void()>& relieve) {
  {
    Kept kept(folder);
    kept.state.grant(7, seconds(5), {});
    kept.state.transact(only(put_of("before", "v")));
    kept.state.transact(only(put_of("leased", "v", {.lease = 7})));
    fill();
    const int64_t revision = kept.state.revision();
    const std::string error = error_of([&] { kept.state.transact(only(put_of("large", std::string(400'000, 'v')))); });
    EXPECT_THAT(error, HasSubstr(expected));
    EXPECT_THAT(error, HasSubstr(folder + "/store.db"));
    EXPECT_EQ(kept.state.find("large"), nullptr);
    EXPECT_EQ(kept.state.revision(), revision);
    const auto small_ones = [&] { kept.state.transact(only(put_of("small", std::string(4000, 'v')))); };
    while (error_of(small_ones) == "(no error)") {
    }
    kept.state.expire(TimePoint{} + seconds(5));
    EXPECT_EQ(kept.state.find("leased"), nullptr) << "who is dead is dead, on a full disk too";
    relieve();
    kept.state.transact(only(put_of("after", "v")));
  }
  const Kept again(folder);
  EXPECT_NE(again.state.find("before"), nullptr);
  EXPECT_NE(again.state.find("after"), nullptr);
  EXPECT_EQ(again.state.find("large"), nullptr);
}

int status_of_child(const std::function<void()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    body();
    ::_exit(testing::Test::HasFailure() ? 1 : 0);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST_F(StateFileTest, AFullDiskRefusesTheWriteAndNothingElse) {
  constexpr int kSkipped = 77;
  const int status = status_of_child([&] {
    const std::string disk = parent_ + "/disk", ballast = disk + "/ballast";
    ::mkdir(disk.c_str(), 0700);
    const bool alone = ::unshare(CLONE_NEWNS | (::geteuid() == 0 ? 0 : CLONE_NEWUSER)) == 0 &&
                       ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
    if (!alone || ::mount("none", disk.c_str(), "tmpfs", 0, "size=1m") != 0) ::_exit(kSkipped);
    live_on_a_full_disk(
        disk + "/store", "resource-exhausted",
        [&] { std::ofstream(ballast, std::ios::binary) << std::string(700'000, 'b'); }, [&] { fs::remove(ballast); });
  });
  if (status == kSkipped) GTEST_SKIP() << "no file system can be mounted here";
  EXPECT_EQ(status, 0);
}

TEST_F(StateFileTest, ADiskThatFailsToWriteRefusesTheWriteAndNothingElse) {
  EXPECT_EQ(status_of_child([&] {
              rlimit limit{};
              ::getrlimit(RLIMIT_FSIZE, &limit);
              const rlim_t whole = limit.rlim_cur;
              ::signal(SIGXFSZ, SIG_IGN);
              live_on_a_full_disk(
                  folder_, "unavailable",
                  [&] {
                    limit.rlim_cur = fs::file_size(folder_ + "/store.db-wal") + 30'000;
                    ::setrlimit(RLIMIT_FSIZE, &limit);
                  },
                  [&] {
                    limit.rlim_cur = whole;
                    ::setrlimit(RLIMIT_FSIZE, &limit);
                  });
            }),
            0);
}

TEST_F(StateFileTest, AFolderThatCannotBeWrittenIsNamed) {
  EXPECT_THAT(error_of([&] { StateFile(parent_ + "/no/folder"); }), HasSubstr("not-found"));
  EXPECT_EQ(status_of_child([&] {
              ::mkdir(folder_.c_str(), 0500);
              if (::geteuid() == 0) {  // root ignores modes
                ::chmod(parent_.c_str(), 0755);
                const bool other = ::chown(folder_.c_str(), 65534, 65534) == 0 && ::setresuid(65534, 65534, 65534) == 0;
                ASSERT_TRUE(other);
              }
              const std::string error = error_of([&] { StateFile file(folder_); });
              EXPECT_THAT(error, HasSubstr("permission-denied"));
              EXPECT_THAT(error, HasSubstr(folder_));
            }),
            0);
}

TEST_F(StateFileTest, AFolderIsOneStores) {
  const StateFile first(folder_);
  const std::string error = error_of([&] { StateFile second(folder_); });
  EXPECT_THAT(error, HasSubstr("already-exists"));
  EXPECT_THAT(error, HasSubstr(folder_));
  struct stat status{};
  ASSERT_EQ(::stat((folder_ + "/store.db").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600U);
}

TEST_F(StateFileTest, AForeignOrDamagedFileIsRefused) {
  {
    Kept(folder_).state.transact(only(put_of("k", "v")));
  }
  const fs::path sound = parent_ + "/sound";
  fs::copy(folder_, sound);
  const auto error_after = [&](const char* sql) {
    fs::remove_all(folder_);
    fs::copy(sound, folder_);
    change_database(sql);
    return error_of([&] { Kept kept(folder_); });
  };
  EXPECT_EQ(error_after("PRAGMA user_version = 1"), "(no error)");
  EXPECT_THAT(error_after("PRAGMA user_version = 900"), HasSubstr("mismatch"));
  EXPECT_THAT(error_after("PRAGMA application_id = 1"), HasSubstr("something else"));
  for (const char* hostile : {"UPDATE keys SET version = -1", "UPDATE keys SET key = x''", "UPDATE keys SET lease = 77",
                              "UPDATE keys SET mod_revision = 9223372036854775807", "UPDATE store SET revision = -1",
                              "INSERT INTO leases VALUES(5, -1)", "DROP TABLE leases"})
    EXPECT_THAT(error_after(hostile), HasSubstr("data-loss")) << hostile;

  std::ofstream(folder_ + "/store.db") << std::string(8192, 'x');
  EXPECT_THAT(error_of([&] { Kept kept(folder_); }), HasSubstr("data-loss"));
}

TEST_F(StateFileTest, AServerThatComesBackAnswersAtOnceFromItsFolder) {
  FakeClock clock;
  ServerOptions options;
  options.clock = &clock;  // no need to wait for a republication
  options.data_dir = folder_;
  auto server = tcp_server(options);
  const uint16_t port = host_port_of(*server).port;
  const auto client = open_store(server->address());
  const LeaseId lease = client->grant_lease(std::chrono::hours(1));
  client->put("own", "mine", {.lease = lease});
  client->put("plain", "kept");
  const SwapResult decided = client->put_if_absent("decided", "yes", {.decision = true});
  Events events;
  const auto watch = client->watch("", client->range("").revision + 1, events.callback());

  server.reset();
  server = tcp_server(options, port);
  EXPECT_EQ(client->get("plain")->value, "kept");
  EXPECT_EQ(client->get("decided"), decided.current);
  EXPECT_EQ(client->get("own")->lease, lease);
  EXPECT_EQ(events.wait_end(), WatchUpdate::Type::kCompacted);
  EXPECT_FALSE(client->put_if_absent("decided", "no").stored);
  EXPECT_TRUE(client->compare_and_set("decided", decided.current.mod_revision, "done").stored);
  EXPECT_GT(client->range("").revision, decided.current.mod_revision);
}

}  // namespace
}  // namespace tessera::store
