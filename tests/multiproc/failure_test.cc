// What the others see when a rank dies, is late, or disagrees with its own ranks. Every case ends within the hang
// limit, with an error that names who and what, and leaves nothing in the runtime folder except what SIGKILLed
// processes could not remove, which the next process to start removes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <thread>

#include "base/fail.h"
#include "base/runtime_dir.h"
#include "base/socket.h"
#include "tessera/store.h"
#include "tests/support/fixture.h"
#include "transport/testing.h"

namespace tessera::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

int die(Batch&, std::vector<float>&) {
  ::kill(::getpid(), SIGKILL);
  return 0;
}
// Runs the body once all that pass the barrier have attached.
Body after(Barrier& attached, const Body& body) {
  return [&attached, body](Batch& batch, std::vector<float>& tensor) {
    attached.pass();
    return body(batch, tensor);
  };
}

// What trainer/0 has published once it has joined the pair, and once it has registered its tensors.
const std::string kJoinedKey = store_key("default", "pair", "weights/trainer/0");
const std::string kRegisteredKey = store_key("default", "batch", "weights/policy/inference+trainer/trainer/rank/0");

class Failure : public JobsTest {
 protected:
  void wait() {
    const std::vector<Outcome> outcomes = JobsTest::wait(hang_limit());
    const auto killed = std::ranges::count(outcomes, -SIGKILL, &Outcome::status);
    EXPECT_LE(left_folders(), killed);
    afterwards("tidy", [] {
      RuntimeDir::open();
      return 0;
    });
    EXPECT_EQ(left_folders(), 0);
  }
  // Runs `body` in a separate process, once all others have ended.
  void afterwards(const std::string& name, std::function<int()> body) {
    const Outcome& outcome = of(start(name, std::move(body)));
    EXPECT_EQ(outcome.status, 0) << name << ": " << outcome.output;
  }
  // In a process of the group: returns once `key` is in the store.
  void await_key(const std::string& key) const {
    open_store(store_)->wait_for(key, [](const StoreView& items) { return !items.empty(); }, hang_limit());
  }
};

TEST_F(Failure, AKilledSenderIsNamedByEveryReceiver) {
  Barrier attached;
  start(trainer(0), after(attached, send_once));
  start(trainer(1), after(attached, die));
  start(inference(0), after(attached, receive_once));
  start(inference(1), after(attached, receive_once));
  attached.open();
  wait();
  for (const char* name : {"inference/0", "inference/1", "trainer/0"}) {
    EXPECT_EQ(of(name).status, kPeerLost) << of(name).output;
    EXPECT_THAT(of(name).output, AllOf(HasSubstr("trainer/1"), HasSubstr("batch policy of pair weights"))) << name;
  }
}

TEST_F(Failure, AKilledReceiverIsNamedByEverySender) {
  Barrier attached;
  start(trainer(0), after(attached, send_once));
  start(trainer(1), after(attached, send_once));
  start(inference(0), after(attached, receive_once));
  start(inference(1), after(attached, die));
  attached.open();
  wait();
  for (const char* name : {"trainer/0", "trainer/1"}) {
    EXPECT_EQ(of(name).status, kPeerLost) << of(name).output;
    EXPECT_THAT(of(name).output, HasSubstr("inference/1"));
  }
}

TEST_F(Failure, ARankThatNeverSendsIsNamedAtTheDeadline) {
  Barrier verdicts;  // nobody goes before all have theirs: a batch that is closed would give another one
  const auto until_its_deadline = [&](Handle handle) {
    handle.wait_for(hang_limit());
    verdicts.pass();
    return static_cast<int>(handle.wait());
  };
  const Timeout patience = std::chrono::milliseconds(500);
  const auto receive = [&](Batch& batch, std::vector<float>&) { return until_its_deadline(batch.recv({}, patience)); };
  start(trainer(0), [&](Batch& batch, std::vector<float>&) { return until_its_deadline(batch.send({}, patience)); });
  start(trainer(1), [&](Batch&, std::vector<float>&) {
    verdicts.pass();
    return 0;
  });
  start(inference(0), receive);
  start(inference(1), receive);
  verdicts.open();
  wait();
  EXPECT_EQ(of("trainer/1").status, 0) << of("trainer/1").output;
  for (const char* name : {"trainer/0", "inference/0", "inference/1"})
    EXPECT_EQ(of(name).status, kDeadline) << name << ": " << of(name).output;
  EXPECT_THAT(of("trainer/0").output, HasSubstr("inference/0, inference/1 did not come to take it"));
  EXPECT_THAT(of("inference/0").output, AllOf(HasSubstr("for version 1 or newer"), HasSubstr("trainer/1")));
  EXPECT_THAT(of("inference/1").output, HasSubstr("missing inference/0 to choose a version"));
}

TEST_F(Failure, ADuplicateRankIsRefusedWithBothPids) {
  Barrier claimed;
  Barrier refused;
  const pid_t first = start("first", [&] {
    const Bus bus({.job = "spare", .store = store_});
    claimed.pass();
    refused.pass();
    return 0;
  });
  const pid_t second = start("second", [&] {
    claimed.pass();
    const Bus bus({.job = "spare", .store = store_});
    return 0;
  });
  claimed.open();
  refused.open();
  wait();
  EXPECT_EQ(of("first").status, 0) << of("first").output;
  EXPECT_EQ(of("second").status, kExists) << of("second").output;
  EXPECT_THAT(of("second").output, AllOf(HasSubstr(fmt::format("spare/0 is pid {} (", first)),
                                         HasSubstr(fmt::format(") already, and this is pid {} (", second))));
}

TEST_F(Failure, ARankThatDiedWhileItWaitedIsReplacedByTheNextProcess) {
  start(inference(0, 1), receive_once);
  const pid_t first = start("first", [this] { return with_batch(trainer(0), store_, send_once); });
  Barrier dead;
  start("trainer/0", [=, this, &dead] {
    const UniqueFd death(static_cast<int>(::syscall(SYS_pidfd_open, first, 0)));
    await_key(kJoinedKey);
    ::kill(first, SIGKILL);
    if (!wait_ready(death.get(), POLLIN, Deadline::after(hang_limit()))) return 1;
    dead.pass();
    return with_batch(trainer(0), store_, send_once);
  });
  start("trainer/1", [this, &dead] {
    dead.pass();
    return with_batch(trainer(1), store_, send_once);
  });
  dead.open();
  wait();
  EXPECT_EQ(of("first").status, -SIGKILL);
  for (const char* name : {"trainer/0", "trainer/1", "inference/0"})
    EXPECT_EQ(of(name).status, 0) << name << ": " << of(name).output;
}

TEST_F(Failure, RanksThatDisagreeOnTheWorldAreNamed) {
  start(trainer(0, 2), send_once);
  start(trainer(1, 3), send_once);
  wait();
  for (const char* name : {"trainer/0", "trainer/1"}) {
    EXPECT_EQ(of(name).status, kMismatch) << of(name).output;
    EXPECT_THAT(of(name).output,
                AllOf(HasSubstr("world"), HasSubstr("trainer/1 says 3"), HasSubstr("trainer/0 says 2")));
  }
}

TEST_F(Failure, EveryMismatchIsReportedAtOnce) {
  Side odd = trainer(1);
  odd.shape = {64, 40};
  start(trainer(0), send_once);
  start(odd, send_once);
  start(inference(0), receive_once);
  start(inference(1), receive_once);
  wait();
  for (const char* name : {"trainer/0", "trainer/1", "inference/0", "inference/1"}) {
    EXPECT_EQ(of(name).status, kMismatch) << name << ": " << of(name).output;
    EXPECT_THAT(of(name).output, AllOf(HasSubstr("trainer/1 has shape 64x40"), HasSubstr("trainer/0 has 64x48")));
  }
}

TEST_F(Failure, SendersThatDisagreeSaySoThoughTheReceiverOnlyReadsTheManifest) {
  Side odd = trainer(1);
  odd.layout = "2:R";
  start(trainer(0), send_once);
  start(odd, send_once);
  start(inference(0, 1), [](Pair& pair) { return static_cast<int>(pair.manifest("policy").size()); });
  wait();
  for (const char* name : {"trainer/0", "trainer/1", "inference/0"}) {
    EXPECT_EQ(of(name).status, kMismatch) << name << ": " << of(name).output;
    EXPECT_THAT(of(name).output,
                HasSubstr("the ranks of job trainer disagree: tensor weight: trainer/1 has layout 2:R, "
                          "trainer/0 has 2:S0"));
  }
}

TEST_F(Failure, AReceiverThatLeavesOnceItHasReadTheManifestIsNotCalledDead) {
  Barrier told;
  start(trainer(0), send_once);
  start(trainer(1), send_once);
  start("inference/0", [&] {
    with_pair(inference(0, 1), store_, [](Pair& pair) { return static_cast<int>(pair.manifest("policy").size()); });
    told.pass();  // the process lives on
    return 0;
  });
  told.open();
  wait();
  EXPECT_EQ(of("inference/0").status, 0) << of("inference/0").output;
  for (const char* name : {"trainer/0", "trainer/1"}) {
    EXPECT_EQ(of(name).status, kPeerLost) << of(name).output;
    EXPECT_THAT(of(name).output,
                AllOf(HasSubstr("batch policy: inference/0 left before it had registered"), Not(HasSubstr("died"))));
  }
}

// The others may or may not have joined by then.
TEST_F(Failure, ARankThatLeavesOnceItHasJoinedIsNamedByAllOthers) {
  Barrier told;
  start(trainer(0), send_once);
  start(trainer(1), send_once);
  start(inference(0), receive_once);
  start("inference/1", [&] {
    with_pair(inference(1), store_, [](Pair&) { return 0; });
    told.pass();
    return 0;
  });
  told.open();
  wait();
  EXPECT_EQ(of("inference/1").status, 0) << of("inference/1").output;
  for (const char* name : {"trainer/0", "trainer/1", "inference/0"}) {
    EXPECT_EQ(of(name).status, kPeerLost) << of(name).output;
    EXPECT_THAT(of(name).output, AllOf(HasSubstr("inference/1 left before it had registered"), Not(HasSubstr("died"))));
  }
}

TEST_F(Failure, AReceiverThatDiesBeforeItRegistersIsCalledDead) {
  start(trainer(0), send_once);
  start(trainer(1), send_once);
  start(inference(0, 1), [](Pair& pair) {
    pair.manifest("policy");
    return ::kill(::getpid(), SIGKILL);
  });
  wait();
  for (const char* name : {"trainer/0", "trainer/1"}) {
    EXPECT_EQ(of(name).status, kPeerLost) << of(name).output;
    EXPECT_THAT(of(name).output, HasSubstr("inference/0 died before it had registered"));
  }
}

TEST_F(Failure, ANameThatOnlyTheReceiverHasIsAnError) {
  Side wants = inference(0, 1);
  wants.name = "bias";
  start(trainer(0), send_once);
  start(trainer(1), send_once);
  start(wants, receive_once);
  wait();
  for (const char* name : {"trainer/0", "trainer/1", "inference/0"}) {
    EXPECT_EQ(of(name).status, kMismatch) << of(name).output;
    EXPECT_THAT(of(name).output, HasSubstr("tensor bias: trainer does not offer it"));
  }
}

TEST_F(Failure, MissingRanksAreNamedAtTheRendezvousDeadline) {
  Side alone = trainer(0);
  alone.rendezvous = std::chrono::seconds(1);
  start(alone, send_once);
  wait();
  EXPECT_EQ(of("trainer/0").status, kDeadline) << of("trainer/0").output;
  EXPECT_THAT(of("trainer/0").output,
              AllOf(HasSubstr("trainer/1"), HasSubstr("job inference"), HasSubstr("pair weights")));
}

// Both ends get it, although only the receiver knows that it may not read the sender's private memory.
TEST_F(Failure, ARefusedAttachIsExplainedToBothSides) {
  start(trainer(0, 1), send_once);
  start("inference/0", [this] {
    ::setenv("TESSERA_FORCE_PULL", "readv", 1);
    if (!transport_testing::forbid_process_vm_readv()) return 1;
    return with_batch(inference(0, 1), store_, receive_once);
  });
  wait();
  for (const char* name : {"trainer/0", "inference/0"}) {
    EXPECT_EQ(of(name).status, status_of(ErrorCode::kPermissionDenied)) << of(name).output;
    EXPECT_THAT(of(name).output, AllOf(HasSubstr("trainer/0"), HasSubstr("inference/0"),
                                       HasSubstr("private memory must not be streamed, and cannot be read otherwise")));
  }
}

// Rendezvous that nobody answers, stopped from another thread once they have published their records; it does not
// matter if the stop comes before they wait.
class Stopped : public Failure {
 protected:
  void expect_cancelled_and_nothing_left(const std::string& name, const char* waited_for) {
    wait();
    EXPECT_EQ(of(name).status, status_of(ErrorCode::kCancelled)) << of(name).output;
    EXPECT_THAT(of(name).output, AllOf(HasSubstr(waited_for), HasSubstr("interrupted")));
    afterwards("reader", [this] {
      const StoreView left = open_store(store_)->range("").items;
      for (const auto& [key, item] : left) std::fprintf(stderr, "%s\n", key.c_str());
      return left.empty() ? 0 : 1;
    });
  }
  void outlast(const std::string& job) const {
    open_store(store_)->wait_for(
        store_key("default", "rank", job + "/"), [](const StoreView& ranks) { return ranks.empty(); }, hang_limit());
  }
  std::jthread stop_once_there(const std::string& key, std::stop_source& source) const {
    return std::jthread([this, key, &source] {
      await_key(key);
      source.request_stop();
    });
  }
};

TEST_F(Stopped, APairThatWaitsForTheOtherJob) {
  start("trainer/0", [this] {
    std::stop_source source;
    const std::jthread stopper = stop_once_there(kJoinedKey, source);
    Bus bus({.job = "trainer", .store = store_, .stop = source.get_token()});
    bus.pair({.name = "weights", .peer = "inference"});
    return 0;
  });
  expect_cancelled_and_nothing_left("trainer/0", "pair weights: trainer/0 has waited");
}

TEST_F(Stopped, AManifestThatNobodyOffers) {
  const Signal met;
  start(trainer(0, 1), [&](Pair&) {
    met.raise();
    outlast("inference");
    return 0;
  });
  start("inference/0", [&] {
    std::stop_source source;
    Bus bus({.job = "inference", .store = store_, .stop = source.get_token()});
    Pair pair = bus.pair({.name = "weights", .peer = "trainer"});
    met.wait();
    const std::jthread stopper([&source] { source.request_stop(); });  // nothing is published
    pair.manifest("policy");
    return 0;
  });
  expect_cancelled_and_nothing_left("inference/0", "batch policy: inference/0 has waited");
}

TEST_F(Stopped, ABatchThatTheOtherSideDoesNotRegister) {
  const Signal met;
  start(inference(0, 1), [&](Pair&) {
    met.raise();
    outlast("trainer");
    return 0;
  });
  start("trainer/0", [&, this] {
    std::stop_source source;
    const std::jthread stopper = stop_once_there(kRegisteredKey, source);
    Bus bus({.job = "trainer", .store = store_, .stop = source.get_token()});
    Pair pair = bus.pair({.name = "weights", .peer = "inference"});
    met.wait();
    float weight = 1;
    const TensorSpec spec{.name = "weight", .data = &weight, .shape = {1}};
    pair.offer("policy", {&spec, 1});
    return 0;
  });
  expect_cancelled_and_nothing_left("trainer/0", "batch policy: trainer/0 has waited");
}

// A call that is interrupted, not stopped, and not repeated: it leaves nothing behind, either.
TEST_F(Stopped, ABatchThatIsInterrupted) {
  const Signal met;
  start(inference(0, 1), [&](Pair&) {
    met.raise();
    outlast("trainer");
    return 0;
  });
  start("trainer/0", [&, this] {
    Bus bus({.job = "trainer", .store = store_});
    Pair pair = bus.pair({.name = "weights", .peer = "inference"});
    met.wait();
    const std::jthread interrupter([&, this] {
      await_key(kRegisteredKey);
      bus.interrupt();
    });
    float weight = 1;
    const TensorSpec spec{.name = "weight", .data = &weight, .shape = {1}};
    pair.offer("policy", {&spec, 1});
    return 0;
  });
  expect_cancelled_and_nothing_left("trainer/0", "batch policy: trainer/0 has waited");
}

TEST_F(Stopped, ABusWhoseStoreDoesNotAnswer) {
  start("trainer/0", [] {
    std::stop_source source;
    const UniqueFd mute = listen_tcp({.host = "127.0.0.1", .port = 0});
    const std::jthread stopper([&] {
      if (wait_ready(mute.get(), POLLIN, Deadline::after(hang_limit()))) source.request_stop();  // it has connected
    });
    Bus bus({.job = "trainer",
             .store = fmt::format("tcp://127.0.0.1:{}", local_port(mute.get())),
             .stop = source.get_token()});
    return 0;
  });
  expect_cancelled_and_nothing_left("trainer/0", "store tcp://127.0.0.1:");
}

TEST_F(Failure, ABusGivesUpAStoreThatDoesNotAnswerAtItsOwnDeadline) {
  start("trainer/0", [] {
    Bus bus({.job = "trainer", .store = "tcp://127.0.0.1:1", .timeout = std::chrono::milliseconds(200)});
    return 0;
  });
  wait();
  EXPECT_EQ(of("trainer/0").status, status_of(ErrorCode::kUnavailable)) << of("trainer/0").output;
  EXPECT_LT(of("trainer/0").seconds, 5);
}

TEST_F(Failure, AVersionThatDoesNotGrowIsRefusedWithBothNumbers) {
  start(trainer(0, 1), [](Batch& batch, std::vector<float>&) {
    batch.send(7).wait();
    batch.send(7).wait();
    return 0;
  });
  start(inference(0, 1), receive_once);
  wait();
  EXPECT_EQ(of("trainer/0").status, status_of(ErrorCode::kInvalidArgument)) << of("trainer/0").output;
  EXPECT_THAT(of("trainer/0").output, HasSubstr("version 7 is not newer than 7"));
  EXPECT_EQ(of("inference/0").status, 0) << of("inference/0").output;
}

}  // namespace
}  // namespace tessera::test
