// Jobs whose ranks have agent daemons: the same calls have the same outcomes as with embedded agents.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <optional>

#include "base/clock.h"
#include "base/fail_point.h"
#include "bus/daemon/daemon.h"
#include "tests/support/agents.h"
#include "tests/support/fixture.h"

namespace tessera::test {
namespace {

const BatchOptions kStaged{.mode = Mode::kStaged};

struct Agents {
  bool sender;
  bool receiver;
  bool shared;  // the tensors' memory
  BatchOptions sends, receives;
  std::string name() const {
    const auto mode = [](const BatchOptions& options) { return options.mode == Mode::kStaged ? "Staged" : "InPlace"; };
    return fmt::format("{}{}To{}{}{}", mode(sends), sender ? "Daemon" : "Embedded", mode(receives),
                       receiver ? "Daemon" : "Embedded", shared ? "Shared" : "Private");
  }
  friend void PrintTo(const Agents& agents, std::ostream* out) { *out << agents.name(); }
};

class WithAgents : public JobsTest, public testing::WithParamInterface<Agents> {};

// Three versions between two jobs of two ranks.
TEST_P(WithAgents, VersionsArriveAsWithoutThem) {
  const Agents& param = GetParam();
  const auto side_of = [&](bool sends, Rank rank) {
    Side side = sends ? trainer(rank) : inference(rank);
    side.options = sends ? param.sends : param.receives;
    return (sends ? param.sender : param.receiver) ? with_agent(side) : side;
  };
  for (const Rank rank : {0, 1})
    for (const Side& side : {side_of(true, rank), side_of(false, rank)})
      if (side.agent == "daemon") start_agent(side);
  Barrier all;
  const auto send = [&all](const Side& side, Batch& batch, std::span<float> tensor) {
    for (int64_t version = 1; version <= 3; ++version) {
      fill(side, tensor, version);
      Handle handle = batch.send();
      REQUIRE_HERE(handle.wait() == version);
      REQUIRE_HERE(handle.version() == version && handle.done());
      REQUIRE_HERE(batch.version() == version);
    }
    REQUIRE_HERE(batch.stats().transfers == 3);
    all.pass();  // a staged send is done before it is taken
    return 0;
  };
  const auto receive = [&all](const Side& side, Batch& batch, std::span<float> tensor) {
    for (int64_t version = 1; version < 3;) {
      REQUIRE_HERE(batch.wait_version(version) >= version);
      Handle handle = batch.recv(version);
      version = handle.wait();
      REQUIRE_HERE(holds(side, tensor, version));
      REQUIRE_HERE(batch.version() == version && !batch.torn() && !batch.undecided());
      REQUIRE_HERE(handle.progress().bytes_done == handle.progress().bytes_total);
    }
    REQUIRE_HERE(batch.digests().size() == 1 && batch.digests()[0].name == "weight");
    all.pass();
    return 0;
  };
  for (const Rank rank : {0, 1})
    for (const Side& side : {side_of(true, rank), side_of(false, rank)})
      start(side.who(), [&] {
        const auto transfer = [&](Batch& batch, std::span<float> tensor) {
          return side.sends ? send(side, batch, tensor) : receive(side, batch, tensor);
        };
        return param.shared ? with_shared_batch(side, store_, transfer) : with_batch(side, store_, transfer);
      });
  all.open();
  expect_all_well();
}

INSTANTIATE_TEST_SUITE_P(Agent, WithAgents,
                         testing::Values(Agents{true, true, true, {}, {}}, Agents{true, true, false, {}, {}},
                                         Agents{true, false, true, {}, {}}, Agents{false, true, true, {}, {}},
                                         Agents{false, true, false, {}, kStaged},
                                         Agents{true, true, true, kStaged, kStaged},
                                         Agents{true, true, false, kStaged, {}}),
                         [](const auto& agents) { return agents.param.name(); });

using Agent = JobsTest;

// commit() is the only call that writes staged tensors, in private memory or not.
TEST_F(Agent, StagesAndCommitsInTheWorkersOwnCall) {
  start_agent("inference", 0);
  start(trainer(0, 1), [](Batch& batch, std::vector<float>& tensor) {
    fill(trainer(0, 1), tensor, 1);
    Handle handle = batch.send(1);
    REQUIRE_HERE(handle.wait_for(Timeout::max()) && handle.done());
    return 0;
  });
  const Side side = staged(with_agent(inference(0, 1)));
  start(side, [&](Batch& batch, std::vector<float>& tensor) {
    REQUIRE_HERE(batch.stage().wait() == 1);
    REQUIRE_HERE(!holds(side, tensor, 1));
    REQUIRE_HERE(batch.commit() == 1);
    REQUIRE_HERE(holds(side, tensor, 1) && batch.version() == 1);
    return 0;
  });
  expect_all_well();
}

TEST_F(Agent, SendsCanBeCancelledAndWithdrawn) {
  const Signal over;
  const Side side = with_agent(trainer(0, 1));
  start_agent(side);
  start(side, [&](Batch& batch, std::vector<float>& tensor) {
    fill(side, tensor, 1);
    Handle first = batch.send(1);
    REQUIRE_HERE(first.version() == 1 && !first.wait_for(std::chrono::milliseconds(1)));
    REQUIRE_HERE(first.progress().bytes_done == 0);
    REQUIRE_HERE(a_stop_ends_a_wait_for(first));
    REQUIRE_HERE(fails_with([&] { batch.send(2); }, ErrorCode::kInvalidArgument, ""));
    REQUIRE_HERE(first.cancel());
    REQUIRE_HERE(fails_with([&] { first.wait(); }, ErrorCode::kCancelled, ""));
    Handle second = batch.send(2);
    REQUIRE_HERE(second.withdraw());
    over.raise();
    return 0;
  });
  start(inference(0, 1), [&](Batch&, std::vector<float>&) {
    over.wait();
    return 0;
  });
  expect_all_well();
}

// A handle that is kept alive keeps neither the session nor anything behind it.
TEST_F(Agent, AHandleThatIsKeptHoldsNothingElse) {
  const Side side = with_agent(trainer(0, 1));
  start_agent(side);
  start("trainer/0", [&] {
    std::optional<Handle> kept;
    with_batch(side, store_, [&](Batch& batch, std::vector<float>& tensor) {
      fill(side, tensor, 1);
      kept.emplace(batch.send(1));
      kept->wait();
      return 0;
    });
    Bus(worker_of("trainer", store_));  // the agent is free
    REQUIRE_HERE(kept->wait() == 1 && kept->done() && kept->version() == 1 && !kept->cancel() && !kept->withdraw());
    return 0;
  });
  start(inference(0, 1), receive_once);
  expect_all_well();
}

// A process that may start no more threads refuses, and still releases its rank.
TEST_F(Agent, GoesOnAfterNoThreadCouldBeStarted) {
  const Signal starve, starved, feed, fed, end;
  start("an agent", [&] {
    const bus::Daemon daemon({.name_space = "default", .job = "trainer", .rank = 0});
    pthread_attr_t few, before;
    pthread_getattr_default_np(&before);
    pthread_getattr_default_np(&few);
    REQUIRE_HERE(pthread_attr_setstacksize(&few, size_t{1} << 50) == 0);  // more than there are addresses
    starve.wait();
    REQUIRE_HERE(pthread_setattr_default_np(&few) == 0);
    starved.raise();
    feed.wait();
    REQUIRE_HERE(pthread_setattr_default_np(&before) == 0);
    fed.raise();
    end.wait();
    return 0;
  });
  start("trainer/0", [&] {
    {
      Bus bus(worker_of("trainer", store_));
      starve.raise();
      starved.wait();
      REQUIRE_HERE(fails_with([&] { bus.pair({.name = "weights", .peer = "inference"}); },
                              ErrorCode::kResourceExhausted, "cannot be started"));
    }
    REQUIRE_HERE(
        fails_with([&] { Bus(worker_of("trainer", store_)); }, ErrorCode::kResourceExhausted, "cannot be started"));
    feed.raise();
    fed.wait();
    Bus(worker_of("trainer", store_));
    end.raise();
    return 0;
  });
  expect_all_well();
}

pid_t silent_store = 0;
int decisions = 0;

// Before it takes the next version, it asks the store whether the last one was taken; other commands do not wait for
// that.
TEST_F(Agent, AnswersWhileItAsksTheStore) {
  silent_store = group_.store_pid();
  const Signal over;
  const pid_t agent = start("the agent of inference/0", [] {
    fail_point_hook() = [](std::string_view place) {
      if (place == "staged: before the store" && ++decisions == 2) stop_process(silent_store);
    };
    return run_agent("inference", 0);
  });
  const pid_t sender = start(trainer(0, 1), [&](Batch& batch, std::vector<float>& tensor) {
    for (int64_t version = 1; version <= 2; ++version) {
      fill(trainer(0, 1), tensor, version);
      batch.send(version, kPatience).wait();
    }
    over.wait();
    return 0;
  });
  const Side side = staged(with_agent(inference(0, 1)));
  const pid_t receiver = start(side, [&](Batch& batch, std::vector<float>& tensor) {
    REQUIRE_HERE(batch.recv({}, kPatience).wait() == 1);
    REQUIRE_HERE(fails_with([&] { batch.recv({}, kPatience).wait(); }, ErrorCode::kUnavailable, "undecided"));
    const Deadline soon = Deadline::after(seconds(2));
    Handle handle = batch.recv({}, kPatience);
    REQUIRE_HERE(batch.undecided() && batch.version() == 1 && handle.progress().bytes_done == 0);
    REQUIRE_HERE(!handle.cancel() && !handle.done() && !soon.passed());
    ::kill(silent_store, SIGCONT);
    REQUIRE_HERE(handle.wait() == 2 && holds(side, tensor, 2));
    over.raise();
    return 0;
  });
  for (const pid_t worker : {receiver, sender})
    EXPECT_EQ(of(worker, 3 * hang_limit()).status, 0) << of(worker).name << ": " << of(worker).output;
  ::kill(silent_store, SIGCONT);
  group_.kill(agent, SIGTERM);
  expect_all_well();
}

TEST_F(Agent, IsOneForARankAndForOneWorker) {
  start_agent("trainer", 0);
  const Signal ready, over;
  start("a worker", [&] {
    const Bus bus(worker_of("trainer", store_));
    ready.raise();
    over.wait();
    return 0;
  });
  ready.wait();
  const pid_t second = start("another worker", [&] {
    return fails_with([&] { Bus(worker_of("trainer", store_)); }, ErrorCode::kAlreadyExists, "") ? 0 : 1;
  });
  EXPECT_EQ(of(second).status, 0) << of(second).output;
  over.raise();
  expect_all_well();
}

TEST_F(Agent, ThatDoesNotRunIsAnErrorThatSaysHowToStartIt) {
  start("a worker", [&] {
    BusOptions options = worker_of("trainer", store_);
    options.rank = 2;
    options.world = 4;
    options.timeout = std::chrono::seconds(0);
    REQUIRE_HERE(fails_with([&] { Bus{options}; }, ErrorCode::kUnavailable, "tessera agent --job trainer --rank 2"));
    return 0;
  });
  expect_all_well();
}

}  // namespace
}  // namespace tessera::test
