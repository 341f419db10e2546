// What the others see when a rank dies, is late, or says something else than its fellows. Every case ends within the
// hang limit, with an error that names who and what, and leaves nothing in the runtime folder but what a SIGKILLed
// process could not remove.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <thread>

#include "tessera/store.h"
#include "tests/multiproc/jobs.h"
#include "transport/testing.h"

namespace tessera::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr int kError = 10;  // + ErrorCode: see ProcessGroup::start
constexpr int kPeerLost = kError + static_cast<int>(ErrorCode::kPeerLost);
constexpr int kMismatch = kError + static_cast<int>(ErrorCode::kMismatch);
constexpr int kDeadline = kError + static_cast<int>(ErrorCode::kDeadlineExceeded);
constexpr int kExists = kError + static_cast<int>(ErrorCode::kAlreadyExists);

int send_once(Batch& batch, std::vector<float>&) {
  batch.send().wait();
  return 0;
}
int receive_once(Batch& batch, std::vector<float>&) {
  batch.recv().wait();
  return 0;
}
int die(Batch&, std::vector<float>&) {
  ::kill(::getpid(), SIGKILL);
  return 0;
}

class Failure : public testing::Test {
 protected:
  void start(const Side& side, std::function<int(Batch&, std::vector<float>&)> body) {
    group_.start(side.job + "/" + std::to_string(side.rank), [=, this] { return with_batch(side, store_, body); });
  }
  const Outcome& of(const std::string& name) const {
    for (const Outcome& outcome : outcomes_)
      if (outcome.name == name) return outcome;
    ADD_FAILURE() << "no process " << name;
    return outcomes_.front();
  }
  void wait() { outcomes_ = group_.wait(hang_limit()); }

  ProcessGroup group_;
  std::string store_ = group_.start_store();
  std::vector<Outcome> outcomes_;
};

TEST_F(Failure, AKilledSenderIsNamedByEveryReceiver) {
  start(trainer(0), send_once);
  start(trainer(1), die);
  start(inference(0), receive_once);
  start(inference(1), receive_once);
  wait();
  for (const char* name : {"inference/0", "inference/1", "trainer/0"}) {
    EXPECT_EQ(of(name).status, kPeerLost) << of(name).output;
    EXPECT_THAT(of(name).output, AllOf(HasSubstr("trainer/1"), HasSubstr("batch policy of pair weights"))) << name;
  }
}

TEST_F(Failure, AKilledReceiverIsNamedByEverySender) {
  start(trainer(0), send_once);
  start(trainer(1), send_once);
  start(inference(0), receive_once);
  start(inference(1), die);
  wait();
  for (const char* name : {"trainer/0", "trainer/1"}) {
    EXPECT_EQ(of(name).status, kPeerLost) << of(name).output;
    EXPECT_THAT(of(name).output, HasSubstr("inference/1"));
  }
}

TEST_F(Failure, ARankThatNeverSendsIsNamedAtTheDeadline) {
  const auto idle = [](Batch&, std::vector<float>&) {
    ::pause();
    return 0;
  };
  const auto receive_for_a_second = [](Batch& batch, std::vector<float>&) {
    batch.recv({}, std::chrono::seconds(1)).wait();
    return 0;
  };
  start(trainer(0), [](Batch& batch, std::vector<float>&) {
    batch.send({}, std::chrono::seconds(3)).wait();
    return 0;
  });
  const Side late = trainer(1);
  const pid_t pid = group_.start("trainer/1", [=, this] { return with_batch(late, store_, idle); });
  start(inference(0), receive_for_a_second);
  start(inference(1), [](Batch& batch, std::vector<float>&) {
    batch.recv({}, std::chrono::seconds(4)).wait();
    return 0;
  });
  // The idle rank has to be ended for wait(); the others must have given their verdicts by then.
  group_.start("killer", [pid] {
    ::usleep(5'000'000);
    return ::kill(pid, SIGKILL);
  });
  wait();
  EXPECT_EQ(of("inference/0").status, kDeadline) << of("inference/0").output;
  EXPECT_THAT(of("inference/0").output, AllOf(HasSubstr("trainer/1"), HasSubstr("version")));
}

TEST_F(Failure, ADuplicateRankIsRefusedWithBothPids) {
  start(trainer(0, 1), [](Batch&, std::vector<float>&) { return 0; });
  group_.start("second", [this] {
    Bus bus({.job = "spare", .rank = 0, .world = 1, .store = store_});
    Bus again({.job = "spare", .rank = 0, .world = 1, .store = store_});
    return 0;
  });
  start(inference(0, 1), [](Batch&, std::vector<float>&) { return 0; });
  wait();
  EXPECT_EQ(of("second").status, kExists) << of("second").output;
  EXPECT_THAT(of("second").output, AllOf(HasSubstr("duplicate rank: spare/0 is pid"), HasSubstr("this is pid")));
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

// Both ends, though only the receiver knows that it may not read the sender's private memory.
TEST_F(Failure, ARefusedAttachIsExplainedToBothSides) {
  start(trainer(0, 1), send_once);
  group_.start("inference/0", [this] {
    ::setenv("TESSERA_FORCE_PULL", "readv", 1);
    if (!transport_testing::forbid_process_vm_readv()) return 1;
    return with_batch(inference(0, 1), store_, receive_once);
  });
  wait();
  for (const char* name : {"trainer/0", "inference/0"}) {
    EXPECT_EQ(of(name).status, kError + static_cast<int>(ErrorCode::kPermissionDenied)) << of(name).output;
    EXPECT_THAT(of(name).output, AllOf(HasSubstr("trainer/0"), HasSubstr("inference/0"),
                                       HasSubstr("process_vm_readv is forced but not permitted")));
  }
}

// Rendezvous that nobody answers, stopped from another thread.
class Stopped : public Failure {
 protected:
  void expect_cancelled_and_nothing_left(const std::string& name, const char* waited_for) {
    wait();
    EXPECT_EQ(of(name).status, kError + static_cast<int>(ErrorCode::kCancelled)) << of(name).output;
    EXPECT_THAT(of(name).output, AllOf(HasSubstr(waited_for), HasSubstr("interrupted")));
    EXPECT_THAT(open_store(store_)->range("").items, testing::IsEmpty());
    EXPECT_THAT(group_.left_over(), testing::Each(testing::Not(testing::StartsWith("p-"))));
  }
  void outlast(const std::string& job) const {
    open_store(store_)->wait_for(
        store_key("default", "rank", job + "/"), [](const StoreView& ranks) { return ranks.empty(); }, hang_limit());
  }
  static std::jthread stop_soon(std::stop_source& source) {
    return std::jthread([&source] {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));  // by then it waits; sooner is as good
      source.request_stop();
    });
  }
};

TEST_F(Stopped, APairThatWaitsForTheOtherJob) {
  group_.start("trainer/0", [this] {
    std::stop_source source;
    const std::jthread stopper = stop_soon(source);
    Bus bus({.job = "trainer", .store = store_, .stop = source.get_token()});
    bus.pair({.name = "weights", .peer = "inference"});
    return 0;
  });
  expect_cancelled_and_nothing_left("trainer/0", "pair weights: trainer/0 has waited");
}

TEST_F(Stopped, AManifestThatNobodyOffers) {
  group_.start("trainer/0", [this] {
    Bus bus({.job = "trainer", .store = store_});
    Pair pair = bus.pair({.name = "weights", .peer = "inference"});
    outlast("inference");
    return 0;
  });
  group_.start("inference/0", [this] {
    std::stop_source source;
    Bus bus({.job = "inference", .store = store_, .stop = source.get_token()});
    Pair pair = bus.pair({.name = "weights", .peer = "trainer"});
    const std::jthread stopper = stop_soon(source);
    pair.manifest("policy");
    return 0;
  });
  expect_cancelled_and_nothing_left("inference/0", "batch policy: inference/0 has waited");
}

TEST_F(Stopped, ABatchThatTheOtherSideDoesNotRegister) {
  group_.start("inference/0", [this] {
    Bus bus({.job = "inference", .store = store_});
    Pair pair = bus.pair({.name = "weights", .peer = "trainer"});
    outlast("trainer");
    return 0;
  });
  group_.start("trainer/0", [this] {
    std::stop_source source;
    Bus bus({.job = "trainer", .store = store_, .stop = source.get_token()});
    Pair pair = bus.pair({.name = "weights", .peer = "inference"});
    const std::jthread stopper = stop_soon(source);
    float weight = 1;
    const TensorSpec spec{.name = "weight", .data = &weight, .shape = {1}};
    pair.offer("policy", {&spec, 1});
    return 0;
  });
  expect_cancelled_and_nothing_left("trainer/0", "batch policy: trainer/0 has waited");
}

TEST_F(Stopped, ABusWithoutAStore) {
  group_.start("trainer/0", [] {
    std::stop_source source;
    const std::jthread stopper = stop_soon(source);
    Bus bus({.job = "trainer", .store = "tcp://127.0.0.1:1", .stop = source.get_token()});
    return 0;
  });
  expect_cancelled_and_nothing_left("trainer/0", "store tcp://127.0.0.1:1");
}

TEST_F(Failure, ABusGivesUpAStoreThatDoesNotAnswerAtItsOwnDeadline) {
  group_.start("trainer/0", [] {
    Bus bus({.job = "trainer", .store = "tcp://127.0.0.1:1", .timeout = std::chrono::milliseconds(200)});
    return 0;
  });
  wait();
  EXPECT_EQ(of("trainer/0").status, kError + static_cast<int>(ErrorCode::kUnavailable)) << of("trainer/0").output;
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
  EXPECT_EQ(of("trainer/0").status, kError + static_cast<int>(ErrorCode::kInvalidArgument)) << of("trainer/0").output;
  EXPECT_THAT(of("trainer/0").output, HasSubstr("version 7 is not newer than 7"));
  EXPECT_EQ(of("inference/0").status, 0) << of("inference/0").output;
}

}  // namespace
}  // namespace tessera::test
