// Jobs whose ranks have agent daemons: the same calls with the same outcomes as with embedded agents, and what happens
// when the worker or its agent dies.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <cstring>

#include "base/fail.h"
#include "bus/daemon.h"
#include "tessera/memory.h"
#include "tests/multiproc/agents.h"
#include "tests/multiproc/jobs.h"

namespace tessera::test {
namespace {

constexpr BatchOptions kStaged{.mode = Mode::kStaged};

// A rank whose tensor lies in shared memory: what the agent sees as it is.
int with_shared_batch(const Side& side, const std::string& store,
                      const std::function<int(Batch& batch, float* tensor)>& body) {
  return with_pair(side, store, [&](Pair& pair) {
    const size_t elements = local_tensor(side).size();
    const SharedBuffer memory = SharedHeap::process().allocate(elements * sizeof(float));
    auto* tensor = reinterpret_cast<float*>(memory.data());
    const TensorSpec spec{.name = side.name,
                          .data = tensor,
                          .dtype = side.dtype,
                          .shape = side.shape,
                          .layout = Layout::parse(side.layout)};
    Batch batch = side.sends ? pair.offer("policy", {&spec, 1}, side.rendezvous, side.options)
                             : pair.accept("policy", {&spec, 1}, side.rendezvous, side.options);
    return body(batch, tensor);
  });
}
void fill(const Side& side, float* tensor, int64_t version) {
  std::vector<float> values = local_tensor(side);
  test::fill(side, values, version);
  std::ranges::copy(values, tensor);
}
bool holds(const Side& side, const float* tensor, int64_t version) {
  std::vector<float> values = local_tensor(side);
  std::copy_n(tensor, values.size(), values.begin());
  return test::holds(side, values, version);
}

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

class WithAgents : public testing::TestWithParam<Agents> {};

// Three versions between two jobs of two ranks.
TEST_P(WithAgents, VersionsArriveAsWithoutThem) {
  const Agents& param = GetParam();
  ProcessGroup group;
  const std::string store = group.start_store();
  AgentGroup agents(group);
  const auto side_of = [&](bool sends, Rank rank) {
    Side side = sends ? trainer(rank) : inference(rank);
    side.options = sends ? param.sends : param.receives;
    if (sends ? param.sender : param.receiver) side = with_agent(side);
    return side;
  };
  for (Rank rank = 0; rank < 2; ++rank) {
    if (param.sender) agents.start_agent("trainer", rank);
    if (param.receiver) agents.start_agent("inference", rank);
  }
  Barrier all;
  const auto send = [&all](const Side& side, Batch& batch, auto* tensor) {
    for (int64_t version = 1; version <= 3; ++version) {
      fill(side, *tensor, version);
      Handle handle = batch.send();
      REQUIRE_HERE(handle.wait() == version);
      REQUIRE_HERE(handle.version() == version && handle.done());
      REQUIRE_HERE(batch.version() == version);
    }
    REQUIRE_HERE(batch.stats().transfers == 3);
    all.pass();  // a staged send is done before it is taken
    return 0;
  };
  const auto receive = [&all](const Side& side, Batch& batch, auto* tensor) {
    for (int64_t version = 1; version < 3;) {
      REQUIRE_HERE(batch.wait_version(version) >= version);
      Handle handle = batch.recv(version);
      version = handle.wait();
      REQUIRE_HERE(holds(side, *tensor, version));
      REQUIRE_HERE(batch.version() == version && !batch.torn() && !batch.undecided());
      REQUIRE_HERE(handle.progress().bytes_done == handle.progress().bytes_total);
    }
    REQUIRE_HERE(batch.digests().size() == 1 && batch.digests()[0].name == "weight");
    all.pass();
    return 0;
  };
  for (Rank rank = 0; rank < 2; ++rank)
    for (const bool sends : {true, false})
      agents.start(fmt::format("{}/{}", sends ? "trainer" : "inference", rank), [=, &param] {
        const Side side = side_of(sends, rank);
        if (param.shared)
          return with_shared_batch(side, store, [&](Batch& batch, float* tensor) {
            return sends ? send(side, batch, &tensor) : receive(side, batch, &tensor);
          });
        return with_batch(side, store, [&](Batch& batch, std::vector<float>& tensor) {
          return sends ? send(side, batch, &tensor) : receive(side, batch, &tensor);
        });
      });
  all.open();
  agents.wait(2 * hang_limit());
  EXPECT_THAT(group.left_over(), testing::Each(testing::Not(testing::StartsWith("p-"))));
}

INSTANTIATE_TEST_SUITE_P(Agent, WithAgents,
                         testing::Values(Agents{true, true, true, {}, {}}, Agents{true, true, false, {}, {}},
                                         Agents{true, false, true, {}, {}}, Agents{false, true, true, {}, {}},
                                         Agents{false, true, false, {}, kStaged},
                                         Agents{true, true, true, kStaged, kStaged},
                                         Agents{true, true, false, kStaged, {}}),
                         [](const auto& agents) { return agents.param.name(); });

// What is staged is written by commit() alone, private memory or not.
TEST(Agent, StagesAndCommitsInTheWorkersOwnCall) {
  ProcessGroup group;
  const std::string store = group.start_store();
  AgentGroup agents(group);
  agents.start_agent("inference", 0);
  agents.start("trainer/0", [=] {
    return with_batch(trainer(0, 1), store, [](Batch& batch, std::vector<float>& tensor) {
      fill(trainer(0, 1), tensor, 1);
      batch.send(1).wait();
      return 0;
    });
  });
  agents.start("inference/0", [=] {
    Side side = with_agent(inference(0, 1));
    side.options = kStaged;
    return with_batch(side, store, [&](Batch& batch, std::vector<float>& tensor) {
      REQUIRE_HERE(batch.stage().wait() == 1);
      REQUIRE_HERE(!holds(side, tensor, 1));
      REQUIRE_HERE(batch.commit() == 1);
      REQUIRE_HERE(holds(side, tensor, 1) && batch.version() == 1);
      return 0;
    });
  });
  agents.wait(2 * hang_limit());
}

TEST(Agent, SendsCanBeCancelledAndWithdrawn) {
  ProcessGroup group;
  const std::string store = group.start_store();
  AgentGroup agents(group);
  const Signal over;
  agents.start_agent("trainer", 0);
  agents.start("trainer/0", [&, store] {
    const Side side = with_agent(trainer(0, 1));
    return with_batch(side, store, [&](Batch& batch, std::vector<float>& tensor) {
      fill(side, tensor, 1);
      Handle first = batch.send(1);
      REQUIRE_HERE(first.version() == 1 && !first.wait_for(std::chrono::milliseconds(1)));
      REQUIRE_HERE(first.progress().bytes_done == 0);
      try {
        batch.send(2);
        REQUIRE_HERE(false);
      } catch (const Error& error) {
        REQUIRE_HERE(error.code() == ErrorCode::kInvalidArgument);
      }
      REQUIRE_HERE(first.cancel());
      try {
        first.wait();
        REQUIRE_HERE(false);
      } catch (const Error& error) {
        REQUIRE_HERE(error.code() == ErrorCode::kCancelled);
      }
      Handle second = batch.send(2);
      REQUIRE_HERE(second.withdraw());
      over.raise();
      return 0;
    });
  });
  agents.start("inference/0", [&, store] {
    return with_batch(inference(0, 1), store, [&](Batch&, std::vector<float>&) {
      over.wait();
      return 0;
    });
  });
  agents.wait(2 * hang_limit());
}

// What a worker has posted from shared memory arrives though it is killed before anybody has taken it.
TEST(Agent, FinishesWhatADeadWorkerHadPosted) {
  ProcessGroup group;
  const std::string store = group.start_store();
  AgentGroup agents(group);
  const Signal posted, taken;
  agents.start_agent("trainer", 0);
  const pid_t worker = group.start("trainer/0", [&, store] {
    const Side side = with_agent(trainer(0, 1));
    return with_shared_batch(side, store, [&](Batch& batch, float* tensor) {
      fill(side, tensor, 7);
      Handle handle = batch.send(7);
      REQUIRE_HERE(handle.version() == 7);
      ::kill(::getpid(), SIGKILL);
      return 1;
    });
  });
  agents.start("inference/0", [&, store] {
    return with_batch(inference(0, 1), store, [&](Batch& batch, std::vector<float>& tensor) {
      posted.wait();
      REQUIRE_HERE(batch.recv().wait() == 7);
      REQUIRE_HERE(holds(inference(0, 1), tensor, 7));
      return 0;
    });
  });
  EXPECT_EQ(group.wait_for(worker, hang_limit()).status, -SIGKILL);
  posted.raise();
  agents.wait(2 * hang_limit());
}

// The next worker takes its place at once: it does not wait for sends that nobody has taken.
TEST(Agent, WorksForTheNextWorker) {
  ProcessGroup group;
  const std::string store = group.start_store();
  AgentGroup agents(group);
  const Signal dead;
  agents.start_agent("trainer", 0);
  const pid_t first = group.start("trainer/0", [&, store] {
    return with_shared_batch(with_agent(trainer(0, 1)), store, [&](Batch& batch, float*) {
      Handle handle = batch.send(1, std::chrono::hours(1));
      REQUIRE_HERE(handle.version() == 1);
      ::kill(::getpid(), SIGKILL);
      return 1;
    });
  });
  agents.start("inference/0", [&, store] {
    return with_batch(inference(0, 1), store, [&](Batch& batch, std::vector<float>& tensor) {
      dead.wait();
      int64_t version = 0;
      while (version < 9) went_well([&] { version = batch.recv(9).wait(); });
      REQUIRE_HERE(holds(inference(0, 1), tensor, version));
      return 0;
    });
  });
  EXPECT_EQ(group.wait_for(first, hang_limit()).status, -SIGKILL);
  dead.raise();
  agents.start("the next trainer/0", [&, store] {
    const Side side = with_agent(trainer(0, 1));
    return with_batch(side, store, [&](Batch& batch, std::vector<float>& tensor) {
      fill(side, tensor, 9);
      while (!went_well([&] { batch.send(9).wait(); })) continue;
      return 0;
    });
  });
  agents.wait(2 * hang_limit());
}

// A worker hears of its agent's death in every call, at once; a new Bus goes on with the next agent.
TEST(Agent, ItsDeathEndsCallsAndANewBusGoesOn) {
  ProcessGroup group;
  const std::string store = group.start_store();
  AgentGroup agents(group);
  const Signal waiting, killed, restarted;
  const pid_t agent = group.start("an agent", [] {
    // Killed below.
    const bus::Daemon daemon({.name_space = "default", .job = "inference", .rank = 0});
    ::pause();
    return 1;
  });
  agents.start("inference/0", [&, store] {
    const Side side = with_agent(inference(0, 1));
    try {
      with_batch(side, store, [&](Batch& batch, std::vector<float>&) {
        Handle handle = batch.recv();
        waiting.raise();
        try {
          handle.wait();
        } catch (const Error& error) {
          if (std::strstr(error.what(), "outcome unknown") == nullptr) throw;
        }
        killed.wait();
        batch.recv().wait();
        return 0;
      });
      return 1;
    } catch (const Error& error) {
      REQUIRE_HERE(error.code() == ErrorCode::kPeerLost);
      REQUIRE_HERE(std::strstr(error.what(), "the agent of inference/0") != nullptr);
    }
    restarted.wait();
    return with_batch(side, store, [&](Batch& batch, std::vector<float>& tensor) {
      while (!went_well([&] { batch.recv().wait(); })) continue;
      REQUIRE_HERE(holds(side, tensor, batch.version()));
      return 0;
    });
  });
  agents.start("trainer/0", [&, store] {
    return with_batch(trainer(0, 1), store, [&](Batch& batch, std::vector<float>& tensor) {
      restarted.wait();
      fill(trainer(0, 1), tensor, 3);
      while (!went_well([&] { batch.send(3).wait(); })) continue;
      return 0;
    });
  });
  waiting.wait();
  group.kill(agent, SIGKILL);
  EXPECT_EQ(group.wait_for(agent, hang_limit()).status, -SIGKILL);
  killed.raise();
  agents.start_agent("inference", 0);
  restarted.raise();
  restarted.raise();
  agents.wait(3 * hang_limit());
}

TEST(Agent, IsOneForARankAndForOneWorker) {
  ProcessGroup group;
  AgentGroup agents(group);
  const std::string store = group.start_store();
  agents.start_agent("trainer", 0);
  const Signal ready, over;
  agents.start("a worker", [&, store] {
    const Bus bus({.job = "trainer", .rank = 0, .world = 1, .store = store, .agent = "daemon"});
    ready.raise();
    over.wait();
    return 0;
  });
  ready.wait();
  const auto exists = [](const std::function<void()>& body) {
    try {
      body();
    } catch (const Error& error) {
      return error.code() == ErrorCode::kAlreadyExists ? 0 : 1;
    }
    return 2;
  };
  const pid_t worker = group.start("another worker", [&, store] {
    return exists([&] { Bus({.job = "trainer", .rank = 0, .world = 1, .store = store, .agent = "daemon"}); });
  });
  const Outcome second = group.wait_for(worker, hang_limit());
  EXPECT_EQ(second.status, 0) << second.output;
  over.raise();
  agents.wait(hang_limit());
}

TEST(Agent, ThatDoesNotRunIsAnErrorThatSaysHowToStartIt) {
  ProcessGroup group;
  const std::string store = group.start_store();
  group.start("a worker", [&, store] {
    try {
      Bus({.job = "trainer",
           .rank = 2,
           .world = 4,
           .store = store,
           .agent = "daemon",
           .timeout = std::chrono::seconds(0)});
    } catch (const Error& error) {
      REQUIRE_HERE(error.code() == ErrorCode::kUnavailable);
      REQUIRE_HERE(std::strstr(error.what(), "tessera agent --job trainer --rank 2") != nullptr);
      return 0;
    }
    return 1;
  });
  expect_all_well(group);
}

}  // namespace
}  // namespace tessera::test
