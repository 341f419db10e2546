#include "store/client/client.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <thread>

#include "store/prefix_follower.h"
#include "store/test_util.h"

namespace tessera::store {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// What a call ends with at its deadline. A busy machine may not get that far in a short time: then it gets longer.
Status with_patience(const std::function<void(Store::Timeout)>& call, std::string_view text) {
  for (Store::Timeout timeout = std::chrono::milliseconds(30);; timeout *= 4) {
    Status status = status_of([&] { call(timeout); });
    if (status.message().find(text) != std::string::npos || timeout > kLimit) return status;
  }
}

class ClientTest : public testing::Test {
 protected:
  std::unique_ptr<Server> server_ = tcp_server();
  std::unique_ptr<Store> store_ = open_store(server_->address());
};

TEST_F(ClientTest, AKeyRemembersItsRevisions) {
  EXPECT_EQ(store_->get("a"), std::nullopt);
  const int64_t first = store_->put("a", "1");
  store_->put("other", "x");
  const int64_t second = store_->put("a", std::string("\0\1", 2));
  EXPECT_EQ(second, first + 2);
  EXPECT_EQ(store_->get("a"), (KeyValue{.key = "a",
                                        .value = std::string("\0\1", 2),
                                        .create_revision = first,
                                        .mod_revision = second,
                                        .version = 2}));
  EXPECT_EQ(store_->erase("a"), 1);
  EXPECT_EQ(store_->erase("a"), 0);
  EXPECT_EQ(store_->get("a"), std::nullopt);
}

TEST_F(ClientTest, APrefixListsAndErases) {
  for (const char* key : {"n/a/1", "n/a/2", "n/b/1"}) store_->put(key, key);
  const StoreRange range = store_->range("n/a/");
  EXPECT_EQ(range.items.size(), 2U);
  EXPECT_EQ(range.revision, 3);
  EXPECT_EQ(store_->range("").items.size(), 3U);
  EXPECT_EQ(store_->erase_prefix("n/a/"), 2);
  EXPECT_EQ(store_->range("").items.size(), 1U);
}

TEST_F(ClientTest, OnlyOnePutsAnAbsentKey) {
  const SwapResult first = store_->put_if_absent("leader", "me", {.decision = true});
  EXPECT_TRUE(first.stored);
  EXPECT_EQ(first.current.value, "me");
  EXPECT_EQ(first.current.version, 1);
  const SwapResult second = store_->put_if_absent("leader", "you");
  EXPECT_FALSE(second.stored);
  EXPECT_EQ(second.current, first.current);
  const SwapResult third = store_->compare_and_set("leader", first.current.mod_revision, "you");
  EXPECT_TRUE(third.stored);
  EXPECT_EQ(third.current.version, 2);
}

TEST_F(ClientTest, CompareAndSetLosesNoIncrementAmongManyThreads) {
  constexpr int kThreads = 6, kIncrements = 40;
  std::vector<std::unique_ptr<Store>> stores;
  for (int i = 0; i < 3; ++i) stores.push_back(open_store(server_->address()));
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      Store& store = *stores[static_cast<size_t>(t) % stores.size()];
      SwapResult swap = store.put_if_absent("n", "0");
      for (int done = 0; done < kIncrements; done += swap.stored ? 1 : 0)
        swap = store.compare_and_set("n", swap.current.mod_revision, std::to_string(std::stoi(swap.current.value) + 1));
    });
  for (std::thread& thread : threads) thread.join();
  const KeyValue last = store_->get("n").value();
  EXPECT_EQ(last.value, std::to_string(kThreads * kIncrements));
  EXPECT_EQ(last.version, kThreads * kIncrements + 1);
  EXPECT_EQ(last.mod_revision, kThreads * kIncrements + 1);
}

TEST_F(ClientTest, AWatchFromARangesRevisionMissesNothing) {
  store_->put("w/before", "0");
  const int64_t revision = store_->range("w/").revision;
  store_->put("w/a", "1");
  store_->put("x/a", "not watched");
  Events events;
  const auto watch = store_->watch("w/", revision + 1, events.callback());
  const auto other = open_store(server_->address());
  other->put("w/b", "2");
  other->erase("w/a");
  EXPECT_THAT(events.wait(3), ElementsAre("put w/a=1", "put w/b=2", "del w/a="));
}

TEST_F(ClientTest, ATransactionReachesAWatchAsOne) {
  std::promise<WatchUpdate> first;
  bool given = false;
  const auto watch = store_->watch("t/", 1, [&](const WatchUpdate& update) {
    if (!std::exchange(given, true)) first.set_value(update);
  });
  StoreTransaction both;
  for (const char* key : {"t/1", "t/2"})
    both.operations.push_back({.type = StoreOperation::Type::kPut, .key = key, .value = "v", .options = {}});
  EXPECT_TRUE(store_->transact(both).succeeded);
  auto update = first.get_future();
  ASSERT_EQ(update.wait_for(kLimit), std::future_status::ready);
  EXPECT_EQ(update.get().events.size(), 2U);
}

TEST_F(ClientTest, AnEndedWatchIsSilent) {
  Events events;
  auto watch = store_->watch("w/", 1, events.callback());
  store_->put("w/1", "");
  events.wait(1);
  watch.reset();
  store_->put("w/2", "");
  Events later;
  const auto again = store_->watch("w/", 1, later.callback());
  EXPECT_EQ(later.wait(2).size(), 2U);
  EXPECT_EQ(events.wait(1).size(), 1U);
}

TEST_F(ClientTest, CallsFromAWatchsCallbackAreRefusedNotDeadlocked) {
  std::promise<ErrorCode> refused;
  const auto watch = store_->watch("w/", 1, [&](const WatchUpdate& update) {
    if (update.type == WatchUpdate::Type::kEvents) refused.set_value(status_of([&] { store_->get("a"); }).code());
  });
  store_->put("w/1", "");
  auto code = refused.get_future();
  ASSERT_EQ(code.wait_for(kLimit), std::future_status::ready);
  EXPECT_EQ(code.get(), ErrorCode::kInvalidArgument);
}

TEST_F(ClientTest, WaitForSeesTheLastOneCome) {
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 4; ++rank)
    ranks.emplace_back([&, rank] { open_store(server_->address())->put(fmt::format("ranks/{}", rank), "in"); });
  const StoreView view = store_->wait_for("ranks/", [](const StoreView& seen) { return seen.size() == 4; }, kLimit);
  EXPECT_EQ(view.size(), 4U);
  for (std::thread& rank : ranks) rank.join();
}

TEST_F(ClientTest, AFollowerGoesOnFromWhatItHasSeen) {
  store_->put("ranks/0", "in");
  store_->put("ranks/1", "in");
  PrefixFollower follower(*store_, "ranks/");
  follower.wait([](const StoreView& seen) { return seen.size() == 2; }, kLimit);
  const Status late = status_of(
      [&] { follower.wait([](const StoreView& seen) { return seen.size() == 3; }, std::chrono::milliseconds(30)); });
  EXPECT_EQ(late.code(), ErrorCode::kDeadlineExceeded);
  EXPECT_EQ(follower.view().size(), 2U);
  const uint64_t before = store_->requests();
  const auto other = open_store(server_->address());
  other->put("ranks/2", "in");
  other->erase("ranks/0");
  other->put("ranks/1", "again");
  follower.wait([](const StoreView& seen) { return seen.contains("ranks/2") && seen.size() == 2; }, kLimit);
  follower.wait([](const StoreView& seen) { return seen.at("ranks/1").value == "again"; }, kLimit);
  EXPECT_EQ(store_->requests(), before);  // it has not listed the keys again
}

TEST_F(ClientTest, AFollowerEndsWhenItIsStopped) {
  PrefixFollower follower(*store_, "never/");
  std::stop_source stop;
  const Status status = status_of(
      [&] { follower.wait([&](const StoreView&) { return stop.request_stop(), false; }, kLimit, stop.get_token()); });
  EXPECT_EQ(status.code(), ErrorCode::kCancelled);
}

TEST_F(ClientTest, WaitForSaysWhatItWaitedFor) {
  store_->put("ranks/0", "");
  const Status status = with_patience(
      [&](Store::Timeout timeout) {
        store_->wait_for("ranks/", [](const StoreView& seen) { return seen.size() == 2; }, timeout);
      },
      "1 keys are there");
  EXPECT_EQ(status.code(), ErrorCode::kDeadlineExceeded);
  EXPECT_THAT(status.message(), HasSubstr("'ranks/*'"));
  EXPECT_THAT(status.message(), HasSubstr("1 keys are there"));
}

TEST_F(ClientTest, LimitsAreCheckedBeforeAnythingIsSent) {
  const uint64_t before = store_->requests();
  EXPECT_EQ(status_of([&] { store_->put("", "v"); }).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(status_of([&] { store_->put("k", std::string(kMaxStoreValueBytes + 1, 'v')); }).code(),
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(status_of([&] { store_->watch("k", 0, nullptr); }).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(store_->requests(), before);
  EXPECT_GT(store_->put("k", std::string(kMaxStoreValueBytes, 'v')), 0);
  EXPECT_EQ(store_->get("k")->value.size(), kMaxStoreValueBytes);
  EXPECT_EQ(store_->requests(), before + 2);
}

TEST_F(ClientTest, APutUnderAnUnknownLeaseIsNotFound) {
  EXPECT_EQ(status_of([&] { store_->put("k", "v", {.lease = 12345}); }).code(), ErrorCode::kNotFound);
}

TEST_F(ClientTest, ClosingRevokesTheClientsLeases) {
  const auto other = open_store(server_->address());
  const LeaseId lease = other->grant_lease(std::chrono::hours(1));
  const int64_t revision = other->put("mine", "1", {.lease = lease});
  Events events;
  const auto watch = store_->watch("mine", revision + 1, events.callback());
  other->close();
  EXPECT_THAT(events.wait(1), ElementsAre("del mine="));
  EXPECT_EQ(status_of([&] { other->get("mine"); }).code(), ErrorCode::kCancelled);
}

TEST_F(ClientTest, CloseEndsWaitsAndWatches) {
  Events events;
  const auto watch = store_->watch("w/", 1, events.callback());
  std::promise<void> waiting;
  std::thread waiter([&] {
    const Status status = status_of(
        [&] { store_->wait_for("never/", [&](const StoreView&) { return waiting.set_value(), false; }, kLimit); });
    EXPECT_NE(status.code(), ErrorCode::kOk);
    EXPECT_NE(status.code(), ErrorCode::kDeadlineExceeded);
  });
  waiting.get_future().wait();
  store_->close();
  waiter.join();
  EXPECT_EQ(events.wait_end(), WatchUpdate::Type::kClosed);
}

TEST_F(ClientTest, AForkedChildMayNotUseTheParentsClient) {
  const pid_t child = ::fork();
  if (child == 0) {
    const Status status = status_of([&] { store_->get("a"); });
    store_.reset();  // neither hangs nor ends the parent's connection
    ::_exit(status.code() == ErrorCode::kInvalidArgument ? 0 : 1);
  }
  int outcome = -1;
  ::waitpid(child, &outcome, 0);
  EXPECT_EQ(outcome, 0);
  EXPECT_GT(store_->put("a", "parent"), 0);
}

TEST(LeaseTest, AnExpiredLeaseTakesItsKeysAsOneChange) {
  FakeClock clock;
  ServerOptions options;
  options.clock = &clock;
  const auto server = tcp_server(std::move(options));
  const auto owner = open_store(server->address());
  const auto other = open_store(server->address());
  const LeaseId lease = owner->grant_lease(std::chrono::hours(3));
  owner->put("l/1", "", {.lease = lease});
  owner->put("l/2", "", {.lease = lease});
  const int64_t revision = owner->put("l/3", "stays");
  Events events;
  const auto watch = other->watch("l/", revision + 1, events.callback());
  run_on(*server, [&] { clock.advance(std::chrono::hours(3) - Duration(1)); });
  EXPECT_EQ(other->range("l/").items.size(), 3U);
  run_on(*server, [&] { clock.advance(Duration(1)); });
  EXPECT_THAT(events.wait(2), ElementsAre("del l/1=", "del l/2="));
  EXPECT_EQ(other->range("l/").revision, revision + 1);
  EXPECT_EQ(status_of([&] { owner->put("l/4", "", {.lease = lease}); }).code(), ErrorCode::kNotFound);
}

TEST(LeaseTest, ALeaseThatExpiredUnderALivingClientComesBackWithItsKeys) {
  FakeClock clock;
  ServerOptions options;
  options.clock = &clock;
  const auto server = tcp_server(std::move(options));
  const auto owner = open_store(server->address());
  const auto other = open_store(server->address());
  const auto start = clock.now();
  const LeaseId lease = owner->grant_lease(std::chrono::milliseconds(30));  // renewed every 10 ms of real time
  const int64_t revision = owner->put("l/1", "back", {.lease = lease});
  Events events;
  const auto watch = other->watch("l/", revision + 1, events.callback());
  // A renewal that is read between the clock's jump and the check of the leases keeps one: then the clock jumps again.
  do {
    run_on(*server, [&] { clock.advance(seconds(1)); });
  } while (events.wait(1, std::chrono::seconds(1)).empty() && clock.now() < start + seconds(60));
  EXPECT_THAT(events.wait(2), ElementsAre("del l/1=", "put l/1=back"));
  EXPECT_EQ(other->get("l/1")->lease, lease);
}

TEST(LeaseTest, RenewalsKeepALeaseAndAreNotCountedAsRequests) {
  FakeClock clock;
  ServerOptions options;
  options.clock = &clock;
  const auto server = tcp_server(std::move(options));
  const auto owner = open_store(server->address());
  const LeaseId lease = owner->grant_lease(std::chrono::milliseconds(30));
  owner->put("kept", "", {.lease = lease});
  owner->revoke_lease(lease);
  EXPECT_EQ(owner->get("kept"), std::nullopt);
  EXPECT_EQ(owner->requests(), 4U);
}

TEST(CompactionTest, AWatchTooFarBackIsToldToListAgain) {
  ServerOptions options;
  options.limits.history_events = 8;
  const auto server = tcp_server(std::move(options));
  const auto store = open_store(server->address());
  for (int i = 0; i < 20; ++i) store->put(fmt::format("c/{}", i), "");
  Events early;
  const auto watch = store->watch("c/", 1, early.callback());
  EXPECT_EQ(early.wait_end(), WatchUpdate::Type::kCompacted);
  Events recent;
  const auto another = store->watch("c/", 20, recent.callback());
  EXPECT_THAT(recent.wait(1), ElementsAre("put c/19="));
}

TEST(ConnectionTest, NoStoreIsAnErrorThatNamesTheUrl) {
  uint16_t port = 0;
  {
    port = local_port(listen_tcp({"127.0.0.1", 0}).get());
  }
  const std::string url = fmt::format("tcp://127.0.0.1:{}", port);
  const Status status =
      with_patience([&](Store::Timeout timeout) { open_store(url, {.connect_timeout = timeout}); }, "refused");
  EXPECT_EQ(status.code(), ErrorCode::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr(url));
  EXPECT_THAT(status.message(), HasSubstr("refused"));
}

TEST(ConnectionTest, UnknownUrlsListTheKnownOnes) {
  for (const char* url : {"", "http://x", "tcp:/x:1", "autos"}) {
    const Status status = status_of([&] { open_store(url); });
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument) << url;
    EXPECT_THAT(status.message(), HasSubstr("auto, tcp://HOST:PORT"));
  }
  const Status etcd = status_of([] { open_store("etcd://127.0.0.1:2379"); });
  EXPECT_EQ(etcd.code(), ErrorCode::kUnimplemented);
  EXPECT_THAT(etcd.message(), HasSubstr("run `tessera store`"));
}

TEST(ConnectionTest, AServerThatDoesNotAnswerEndsACallAtItsDeadline) {
  const auto server = tcp_server();
  const auto store = open_store(server->address());
  std::promise<void> release;
  server->loop().post([&] { release.get_future().wait(); });
  const Status status = status_of([&] { store->get("key", std::chrono::milliseconds(30)); });
  release.set_value();
  EXPECT_EQ(status.code(), ErrorCode::kDeadlineExceeded);
  EXPECT_THAT(status.message(), HasSubstr("get 'key'"));
  EXPECT_THAT(status.message(), HasSubstr(server->address()));
  EXPECT_GT(store->put("key", "later"), 0);
}

TEST(ConnectionTest, WithoutAServerACallIsUnavailable) {
  auto server = tcp_server();
  const auto store = open_store(server->address());
  server.reset();
  const Status status = with_patience([&](Store::Timeout timeout) { store->put("ns/bus/key", "v", {}, timeout); },
                                      "no connection within");
  EXPECT_EQ(status.code(), ErrorCode::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr("put 'ns/bus/key'"));
}

// A call that nobody will answer, ended from another thread; the test never waits for the minute.
TEST(ConnectionTest, AStopEndsWhatWaitsForAConnection) {
  std::stop_source source;
  auto server = tcp_server();
  const std::string url = server->address();
  const auto store = open_store(url, {.stop = source.get_token()});
  server.reset();
  auto call =
      std::async(std::launch::async, [&] { return status_of([&] { store->get("key", std::chrono::minutes(1)); }); });
  auto opening = std::async(std::launch::async, [&] {
    return status_of(
        [&] { open_store(url, {.connect_timeout = std::chrono::minutes(1), .stop = source.get_token()}); });
  });
  source.request_stop();
  for (const Status& status : {call.get(), opening.get()}) {
    EXPECT_EQ(status.code(), ErrorCode::kCancelled);
    EXPECT_THAT(status.message(), HasSubstr(url));
  }
}

TEST(ConnectionTest, AStoppedClientTakesBackWhatItHasPut) {
  std::stop_source source;
  const auto server = tcp_server();
  const auto store = open_store(server->address(), {.stop = source.get_token()});
  store->put("key", "value");
  source.request_stop();
  const Status status = status_of([&] {
    store->wait_for("nobody", [](const StoreView&) { return false; }, std::chrono::minutes(1), source.get_token());
  });
  EXPECT_EQ(status.code(), ErrorCode::kCancelled);
  EXPECT_EQ(store->erase("key"), 1);
}

TEST(ConnectionTest, ARestartedServerGetsBackWhatItsClientsHaveAndSaw) {
  ServerOptions options;
  options.republication = std::chrono::milliseconds(200);
  auto server = tcp_server(options);
  const uint16_t port = host_port_of(*server).port;
  const auto owner = open_store(server->address());
  const auto witness = open_store(server->address());
  const LeaseId lease = owner->grant_lease(std::chrono::hours(1));
  owner->put("own", "mine", {.lease = lease});
  owner->put("plain", "lost");
  owner->put("decided", "no", {.decision = true});
  const int64_t decided = owner->put("decided", "yes", {.decision = true});
  const KeyValue seen = witness->get("decided").value();
  Events events;
  const auto watch = witness->watch("", witness->range("").revision + 1, events.callback());

  server.reset();
  server = tcp_server(options, port);
  EXPECT_EQ(witness->get("decided"), seen);
  EXPECT_EQ(witness->get("own")->lease, lease);
  EXPECT_EQ(witness->get("plain"), std::nullopt);
  EXPECT_EQ(events.wait_end(), WatchUpdate::Type::kCompacted);
  EXPECT_FALSE(witness->put_if_absent("decided", "late").stored);
  EXPECT_TRUE(owner->compare_and_set("decided", decided, "done", {.decision = true}).stored);
  EXPECT_GT(owner->put("plain", "again"), decided);
}

TEST(ConnectionTest, AWaitGoesOnThroughARestart) {
  auto server = tcp_server();
  const uint16_t port = host_port_of(*server).port;
  const auto store = open_store(server->address());
  std::promise<void> waiting;
  std::atomic<bool> said = false;
  std::thread waiter([&] {
    const StoreView view = store->wait_for(
        "go",
        [&](const StoreView& seen) {
          if (!said.exchange(true)) waiting.set_value();
          return !seen.empty();
        },
        kLimit);
    EXPECT_EQ(view.at("go").value, "now");
  });
  waiting.get_future().wait();
  server.reset();
  server = tcp_server({}, port);
  open_store(server->address())->put("go", "now");
  waiter.join();
}

TEST(ConnectionTest, AUnixSocketServesToo) {
  std::string folder = "/tmp/tessera-test-XXXXXX";
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  {
    const auto server = serve_store("unix://" + folder + "/s");
    EXPECT_GT(open_store(server->address())->put("a", "b"), 0);
  }
  EXPECT_EQ(::rmdir(folder.c_str()), 0) << "the server left something behind";
}

TEST(StoreKeyTest, JoinsThreePartsAndRefusesWhatWouldBeAmbiguous) {
  EXPECT_EQ(store_key("run1", "bus", "pair/0"), "run1/bus/pair/0");
  EXPECT_THROW(store_key("a/b", "bus", "k"), Error);
  EXPECT_THROW(store_key("a", "", "k"), Error);
  EXPECT_THROW(store_key("a", "b", ""), Error);
  EXPECT_THROW(store_key("a", "b", std::string(600, 'k')), Error);
}

}  // namespace
}  // namespace tessera::store
