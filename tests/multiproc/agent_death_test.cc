// Workers and their agent daemons that die or are stopped: who is told what, and how work goes on.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/testing.h"
#include "tests/support/agents.h"
#include "tests/support/fixture.h"

namespace tessera::test {
namespace {

using Agent = JobsTest;

// What a worker has posted from shared memory arrives even if the worker is killed before anybody has taken it.
TEST_F(Agent, FinishesWhatADeadWorkerHadPosted) {
  const Signal posted;
  const Side side = with_agent(trainer(0, 1));
  start_agent(side);
  const pid_t worker = start("trainer/0", [&] {
    return with_shared_batch(side, store_, [&](Batch& batch, std::span<float> tensor) {
      fill(side, tensor, 7);
      Handle handle = batch.send(7);
      REQUIRE_HERE(handle.version() == 7);
      return ::kill(::getpid(), SIGKILL);
    });
  });
  start(inference(0, 1), [&](Batch& batch, std::vector<float>& tensor) {
    posted.wait();
    REQUIRE_HERE(batch.recv().wait() == 7);
    REQUIRE_HERE(holds(inference(0, 1), tensor, 7));
    return 0;
  });
  EXPECT_EQ(of(worker).status, -SIGKILL);
  posted.raise();
  expect_all_well();
}

// The next worker takes its place immediately: it does not wait for sends that nobody has taken.
TEST_F(Agent, WorksForTheNextWorker) {
  const Signal dead;
  const Side side = with_agent(trainer(0, 1));
  start_agent(side);
  const pid_t first = start("the first trainer/0", [&] {
    return with_shared_batch(side, store_, [&](Batch& batch, std::span<float>) {
      Handle handle = batch.send(1, std::chrono::hours(1));
      REQUIRE_HERE(handle.version() == 1);
      return ::kill(::getpid(), SIGKILL);
    });
  });
  start(inference(0, 1), [&](Batch& batch, std::vector<float>& tensor) {
    dead.wait();
    int64_t version = 0;
    while (version < 9) went_well([&] { version = batch.recv(9).wait(); });
    REQUIRE_HERE(holds(inference(0, 1), tensor, version));
    return 0;
  });
  EXPECT_EQ(of(first).status, -SIGKILL);
  dead.raise();
  start(side, [&](Batch& batch, std::vector<float>& tensor) {
    fill(side, tensor, 9);
    while (!went_well([&] { batch.send(9).wait(); })) continue;
    return 0;
  });
  expect_all_well();
}

// A worker learns of its agent's death in every call, immediately; a new Bus goes on with the next agent.
TEST_F(Agent, ItsDeathEndsCallsAndANewBusGoesOn) {
  const Signal waiting, killed, restarted;
  const Side side = with_agent(inference(0, 1));
  const pid_t agent = start_agent(side);
  start("inference/0", [&] {
    const auto two_calls = [&](Batch& batch, std::vector<float>&) {
      Handle handle = batch.recv();
      waiting.raise();
      try {
        handle.wait();
      } catch (const Error& error) {
        if (std::string_view(error.what()).find("outcome unknown") == std::string_view::npos) throw;
      }
      killed.wait();
      batch.recv().wait();
      return 0;
    };
    REQUIRE_HERE(
        fails_with([&] { with_batch(side, store_, two_calls); }, ErrorCode::kPeerLost, "the agent of inference/0"));
    restarted.wait();
    return with_batch(side, store_, [&](Batch& batch, std::vector<float>& tensor) {
      while (!went_well([&] { batch.recv().wait(); })) continue;
      REQUIRE_HERE(holds(side, tensor, batch.version()));
      return 0;
    });
  });
  start(trainer(0, 1), [&](Batch& batch, std::vector<float>& tensor) {
    restarted.wait();
    fill(trainer(0, 1), tensor, 3);
    while (!went_well([&] { batch.send(3).wait(); })) continue;
    return 0;
  });
  waiting.wait();
  group_.kill(agent, SIGKILL);
  EXPECT_EQ(of(agent).status, -SIGKILL);
  killed.raise();
  start_agent(side);
  for (int i = 0; i < 2; ++i) restarted.raise();
  expect_all_well(3 * hang_limit());
}

// An operation and a call end long before their deadlines; a new Bus goes on once the agent does.
TEST_F(Agent, ThatIsStoppedIsNamed) {
  const Signal waiting, told, continued, over;
  const pid_t agent = start_agent("inference", 0);
  start("inference/0", [&] {
    const std::string stopped = fmt::format("the agent of inference/0 (pid {}) is stopped", agent);
    const int status = with_batch(with_agent(inference(0, 1)), store_, [&](Batch& batch, std::vector<float>&) {
      Handle handle = batch.recv({}, std::chrono::hours(1));
      waiting.raise();
      const Deadline soon = Deadline::after(hang_limit() / 2);
      REQUIRE_HERE(fails_with([&] { handle.wait(); }, ErrorCode::kPeerLost, stopped));
      REQUIRE_HERE(fails_with([&] { batch.wait_version(1); }, ErrorCode::kPeerLost, stopped));
      batch.close();
      REQUIRE_HERE(fails_with([&] { Bus(worker_of("inference", store_)); }, ErrorCode::kPeerLost, stopped));
      REQUIRE_HERE(!soon.passed());
      return 0;
    });
    told.raise();
    continued.wait();
    Bus(worker_of("inference", store_));
    over.raise();
    return status;
  });
  start(trainer(0, 1), [&](Batch&, std::vector<float>&) {
    over.wait();
    return 0;
  });
  waiting.wait();
  stop_process(agent);
  told.wait();
  ::kill(agent, SIGCONT);
  continued.raise();
  expect_all_well();
}

// Its agent is there, and sends nothing by itself.
TEST_F(Agent, WhoseWorkerIsStoppedNamesIt) {
  const Signal waiting, told, sends;
  const Side side = with_agent(trainer(0, 1));
  start_agent(side);
  const pid_t worker = start(side, [&](Batch& batch, std::vector<float>& tensor) {
    sends.wait();
    fill(side, tensor, 1);
    while (!went_well([&] { batch.send(1, kAttempt).wait(); })) continue;
    return 0;
  });
  start(inference(0, 1), [&](Batch& batch, std::vector<float>& tensor) {
    const std::string stopped = fmt::format("the worker of trainer/0 (pid {}) is stopped", worker);
    Handle handle = batch.recv({}, std::chrono::hours(1));
    waiting.raise();
    const Deadline soon = Deadline::after(hang_limit() / 2);
    REQUIRE_HERE(fails_with([&] { handle.wait(); }, ErrorCode::kPeerLost, stopped) && !soon.passed());
    told.raise();
    sends.raise();
    while (!went_well([&] { batch.recv({}, kAttempt).wait(); })) continue;
    return holds(inference(0, 1), tensor, 1) ? 0 : 5;
  });
  waiting.wait();
  stop_process(worker);
  told.wait();
  ::kill(worker, SIGCONT);
  expect_all_well();
}

// Like an embedded agent's death: the sender learns of it immediately.
TEST_F(Agent, TellsPeersThatItsWorkerHasDied) {
  const Side side = with_agent(inference(0, 1));
  start_agent(side);
  const pid_t worker = start("inference/0", [&] {
    return with_shared_batch(side, store_, [](Batch& batch, std::span<float>) {
      REQUIRE_HERE(batch.recv().wait() == 1);
      return ::kill(::getpid(), SIGKILL);
    });
  });
  start(trainer(0, 1), [&](Batch& batch, std::vector<float>&) {
    batch.send(1).wait();
    await_end(worker);
    REQUIRE_HERE(fails_with([&] { batch.send(2, std::chrono::hours(1)).wait(); }, ErrorCode::kPeerLost,
                            "the worker of inference/0 has died"));
    return 0;
  });
  EXPECT_EQ(of(worker).status, -SIGKILL);
  expect_all_well();
}

}  // namespace
}  // namespace tessera::test
