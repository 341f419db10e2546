// Jobs whose ranks have agent daemons: the same calls with the same outcomes as with embedded agents, and what happens
// when the worker or its agent dies.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <random>
#include <thread>

#include "base/fail.h"
#include "base/fail_point.h"
#include "base/framing.h"
#include "base/runtime_dir.h"
#include "base/socket.h"
#include "bus/batch/client.h"
#include "bus/daemon/client_session.h"
#include "bus/daemon/daemon.h"
#include "bus/daemon/messages.h"
#include "bus/daemon/worker_memory.h"
#include "bus/registration/local_tensors.h"
#include "memory/host/shared_arena.h"
#include "tessera/memory.h"
#include "tessera/version.h"
#include "tests/support/agents.h"
#include "tests/support/jobs.h"

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
      Handle handle = batch.send(1);
      REQUIRE_HERE(handle.wait_for(Timeout::max()) && handle.done());
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
      REQUIRE_HERE(a_stop_ends_a_wait_for(first));
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

// What a batch of the worker's says of its end.
int names(const std::function<void()>& call, ErrorCode code, const std::string& text) {
  try {
    call();
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    REQUIRE_HERE(error.code() == code && std::strstr(error.what(), text.c_str()) != nullptr);
    return 0;
  }
  std::fprintf(stderr, "it went well\n");
  return 1;
}
BusOptions worker_of(const std::string& job, const std::string& store) {
  return {.job = job, .rank = 0, .world = 1, .store = store, .agent = "daemon", .timeout = std::chrono::seconds(5)};
}

// An operation, and a call, end long before their own deadlines; a new Bus goes on once the agent does.
TEST(Agent, ThatIsStoppedIsNamed) {
  ProcessGroup group;
  const std::string store = group.start_store();
  AgentGroup agents(group);
  const Signal waiting, told, continued, over;
  const pid_t agent = agents.start_agent("inference", 0);
  agents.start("inference/0", [&, store] {
    const std::string stopped = fmt::format("the agent of inference/0 (pid {}) is stopped", agent);
    with_batch(with_agent(inference(0, 1)), store, [&](Batch& batch, std::vector<float>&) {
      Handle handle = batch.recv({}, std::chrono::hours(1));
      waiting.raise();
      const Deadline soon = Deadline::after(hang_limit() / 2);
      const int outcome = names([&] { handle.wait(); }, ErrorCode::kPeerLost, stopped);
      const int after = names([&] { batch.wait_version(1); }, ErrorCode::kPeerLost, stopped);
      batch.close();
      const int anew = names([&] { Bus(worker_of("inference", store)); }, ErrorCode::kPeerLost, stopped);
      REQUIRE_HERE(outcome == 0 && after == 0 && anew == 0 && !soon.passed());
      return 0;
    });
    told.raise();
    continued.wait();
    Bus(worker_of("inference", store));
    over.raise();
    return 0;
  });
  const pid_t trainer_0 = group.start("trainer/0", [&, store] {
    return with_batch(trainer(0, 1), store, [&](Batch&, std::vector<float>&) {
      over.wait();
      return 0;
    });
  });
  waiting.wait();
  stop_process(agent);
  told.wait();
  ::kill(agent, SIGCONT);
  continued.raise();
  EXPECT_EQ(group.wait_for(trainer_0, hang_limit()).status, 0);
  agents.wait(2 * hang_limit());
}

// Its agent is there, and sends nothing of itself.
TEST(Agent, WhoseWorkerIsStoppedNamesIt) {
  ProcessGroup group;
  const std::string store = group.start_store();
  AgentGroup agents(group);
  const Signal waiting, told, sends;
  agents.start_agent("trainer", 0);
  const pid_t worker = agents.start("trainer/0", [&, store] {
    const Side side = with_agent(trainer(0, 1));
    return with_batch(side, store, [&](Batch& batch, std::vector<float>& tensor) {
      sends.wait();
      fill(side, tensor, 1);
      while (!went_well([&] { batch.send(1, kPatience).wait(); })) continue;
      return 0;
    });
  });
  agents.start("inference/0", [&, store] {
    const std::string stopped = fmt::format("the worker of trainer/0 (pid {}) is stopped", worker);
    return with_batch(inference(0, 1), store, [&](Batch& batch, std::vector<float>& tensor) {
      Handle handle = batch.recv({}, std::chrono::hours(1));
      waiting.raise();
      const Deadline soon = Deadline::after(hang_limit() / 2);
      REQUIRE_HERE(names([&] { handle.wait(); }, ErrorCode::kPeerLost, stopped) == 0 && !soon.passed());
      told.raise();
      sends.raise();
      while (!went_well([&] { batch.recv({}, kPatience).wait(); })) continue;
      return holds(inference(0, 1), tensor, 1) ? 0 : 5;
    });
  });
  waiting.wait();
  stop_process(worker);
  told.wait();
  ::kill(worker, SIGCONT);
  agents.wait(2 * hang_limit());
}

// As an embedded agent's death: the sender hears of it at once.
TEST(Agent, TellsPeersThatItsWorkerHasDied) {
  ProcessGroup group;
  const std::string store = group.start_store();
  AgentGroup agents(group);
  agents.start_agent("inference", 0);
  const pid_t worker = group.start("inference/0", [&, store] {
    return with_shared_batch(with_agent(inference(0, 1)), store, [](Batch& batch, float*) {
      REQUIRE_HERE(batch.recv().wait() == 1);
      ::kill(::getpid(), SIGKILL);
      return 1;
    });
  });
  agents.start("trainer/0", [&, store] {
    return with_batch(trainer(0, 1), store, [&](Batch& batch, std::vector<float>&) {
      batch.send(1).wait();
      await_end(worker);
      return names([&] { batch.send(2, std::chrono::hours(1)).wait(); }, ErrorCode::kPeerLost,
                   "the worker of inference/0 has died");
    });
  });
  EXPECT_EQ(group.wait_for(worker, hang_limit()).status, -SIGKILL);
  agents.wait(2 * hang_limit());
}

// A handle that is kept keeps neither the session nor what lies behind it.
TEST(Agent, AHandleThatIsKeptHoldsNothingElse) {
  ProcessGroup group;
  const std::string store = group.start_store();
  AgentGroup agents(group);
  agents.start_agent("trainer", 0);
  agents.start("trainer/0", [&, store] {
    const Side side = with_agent(trainer(0, 1));
    std::optional<Handle> kept;
    with_batch(side, store, [&](Batch& batch, std::vector<float>& tensor) {
      fill(side, tensor, 1);
      kept.emplace(batch.send(1));
      kept->wait();
      return 0;
    });
    Bus(worker_of("trainer", store));  // the agent is free
    REQUIRE_HERE(kept->wait() == 1 && kept->done() && kept->version() == 1 && !kept->cancel() && !kept->withdraw());
    return 0;
  });
  agents.start("inference/0", [&, store] {
    return with_batch(inference(0, 1), store, [&](Batch& batch, std::vector<float>&) {
      batch.recv().wait();
      return 0;
    });
  });
  agents.wait(2 * hang_limit());
}

// A process that may have no more threads refuses, and gives its rank back all the same.
TEST(Agent, GoesOnAfterNoThreadCouldBeStarted) {
  ProcessGroup group;
  const std::string store = group.start_store();
  const Signal starve, starved, feed, fed, end;
  const pid_t agent = group.start("an agent", [&] {
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
  const pid_t worker = group.start("trainer/0", [&] {
    {
      Bus bus(worker_of("trainer", store));
      starve.raise();
      starved.wait();
      REQUIRE_HERE(names([&] { bus.pair({.name = "weights", .peer = "inference"}); }, ErrorCode::kResourceExhausted,
                         "cannot be started") == 0);
    }
    REQUIRE_HERE(names([&] { Bus(worker_of("trainer", store)); }, ErrorCode::kResourceExhausted, "cannot be started") ==
                 0);
    feed.raise();
    fed.wait();
    Bus(worker_of("trainer", store));
    end.raise();
    return 0;
  });
  const Outcome worked = group.wait_for(worker, 2 * hang_limit());
  EXPECT_EQ(worked.status, 0) << worked.output;
  const Outcome served = group.wait_for(agent, hang_limit());
  EXPECT_EQ(served.status, 0) << served.output;
}

pid_t silent_store = 0;
int decisions = 0;

// Whether a version was taken is asked of the store before the next one is; other commands do not wait for that.
TEST(Agent, AnswersWhileItAsksTheStore) {
  ProcessGroup group;
  const std::string store = group.start_store();
  silent_store = group.store_pid();
  const Signal over;
  const pid_t agent = group.start("the agent of inference/0", [] {
    fail_point_hook() = [](std::string_view place) {
      if (place == "staged: before the store" && ++decisions == 2) stop_process(silent_store);
    };
    return run_agent("inference", 0);
  });
  const pid_t sender = group.start("trainer/0", [&] {
    return with_batch(trainer(0, 1), store, [&](Batch& batch, std::vector<float>& tensor) {
      for (int64_t version = 1; version <= 2; ++version) {
        fill(trainer(0, 1), tensor, version);
        batch.send(version, kPatience).wait();
      }
      over.wait();
      return 0;
    });
  });
  Side side = with_agent(inference(0, 1));
  side.options = kStaged;
  const pid_t receiver = group.start("inference/0", [&] {
    return with_batch(side, store, [&](Batch& batch, std::vector<float>& tensor) {
      REQUIRE_HERE(batch.recv({}, kPatience).wait() == 1);
      REQUIRE_HERE(names([&] { batch.recv({}, kPatience).wait(); }, ErrorCode::kUnavailable, "undecided") == 0);
      const Deadline soon = Deadline::after(seconds(2));
      Handle handle = batch.recv({}, kPatience);
      REQUIRE_HERE(batch.undecided() && batch.version() == 1 && handle.progress().bytes_done == 0);
      REQUIRE_HERE(!handle.cancel() && !handle.done() && !soon.passed());
      ::kill(silent_store, SIGCONT);
      REQUIRE_HERE(handle.wait() == 2 && holds(side, tensor, 2));
      over.raise();
      return 0;
    });
  });
  for (const pid_t worker : {receiver, sender}) {
    const Outcome outcome = group.wait_for(worker, 3 * hang_limit());
    EXPECT_EQ(outcome.status, 0) << outcome.name << ": " << outcome.output;
  }
  ::kill(silent_store, SIGCONT);
  group.kill(agent, SIGTERM);
  EXPECT_EQ(group.wait_for(agent, hang_limit()).status, 0);
}

// --- what comes from somebody else ---------------------------------------------------------------

// A connection of whoever has come upon the agent's socket.
class Stranger {
 public:
  explicit Stranger(const std::string& job = "trainer") {
    const std::string name = bus::agent_socket_name("default", job, 0);
    std::vector<std::string> found;
    for (const Deadline deadline = Deadline::after(hang_limit()); found.empty(); std::this_thread::yield()) {
      found = RuntimeDir::living_files(RuntimeDir::default_root(), name);
      if (deadline.passed()) fail(ErrorCode::kDeadlineExceeded, "there is no agent");
    }
    for (const Deadline deadline = Deadline::after(hang_limit()); !socket_ && !deadline.passed();) {
      try {
        socket_ = connect_unix(found.front(), deadline);
      } catch (const Error&) {
        std::this_thread::yield();  // it does not listen yet
      }
    }
  }
  void send_bytes(std::span<const std::byte> bytes) const { (void)send_some(socket_.get(), bytes); }
  void send(bus::AgentMessage type, std::span<const std::byte> payload = {}, size_t fds = 0,
            uint32_t magic = bus::kAgentMagic) const {
    FrameWriter writer(magic, bus::kAgentProtocol, 1 << 20);
    std::vector<UniqueFd> copies;
    for (size_t i = 0; i < fds; ++i) copies.push_back(duplicate_fd(socket_.get()));
    writer.push(static_cast<uint16_t>(type), payload, std::move(copies));
    writer.flush(socket_.get(), Deadline::after(hang_limit()));
  }
  // Why it is refused; empty if the connection just ends.
  std::string refusal() const {
    FrameReader reader(bus::kAgentMagic, {.payload_bytes = 1 << 20, .fds = 0});
    try {
      const Frame frame = wait_frame(socket_.get(), reader, Deadline::after(hang_limit()));
      return read_message<bus::CallFailed>(frame.payload, "the agent").status.message();
    } catch (const Error& error) {
      return error.code() == ErrorCode::kDeadlineExceeded ? "no answer" : "";
    }
  }
  const UniqueFd& socket() const { return socket_; }

 private:
  UniqueFd socket_;
};

size_t descriptors_of(pid_t pid) {
  const std::filesystem::directory_iterator fds(fmt::format("/proc/{}/fd", pid));
  return static_cast<size_t>(std::distance(begin(fds), end(fds)));
}

// Nothing that anybody says to its socket keeps it from its work, or leaves anything behind.
TEST(Agent, OutlivesNonsense) {
  ProcessGroup group;
  const std::string store = group.start_store();
  AgentGroup agents(group);
  const pid_t agent = agents.start_agent("trainer", 0);
  agents.start("a stranger", [&, store] {
    {
      Bus(worker_of("trainer", store));
    }  // what is made once is there
    const size_t before = descriptors_of(agent);
    std::mt19937 random(7);
    for (int round = 0; round < 20; ++round) {
      const Stranger noise;
      std::vector<std::byte> bytes(random() % 300 + 16);
      for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
      noise.send_bytes(bytes);
      REQUIRE_HERE(noise.refusal() != "no answer");
    }
    const auto refused = [](const Stranger& stranger) { return stranger.refusal() != "no answer"; };
    {
      const Stranger other;
      other.send(bus::AgentMessage::kOpen, {}, 0, 0x12345678);
      REQUIRE_HERE(refused(other));
    }
    {
      const Stranger large;
      const uint32_t header[] = {bus::kAgentMagic, 0x00010001, 0xffffffff, 0};
      large.send_bytes(std::as_bytes(std::span(header)));
      REQUIRE_HERE(refused(large));
    }
    for (const int type : {0, 2, 999}) {
      const Stranger unknown;
      unknown.send(static_cast<bus::AgentMessage>(type), std::vector<std::byte>(8));
      REQUIRE_HERE(refused(unknown));
    }
    for (const bus::AgentMessage type :
         {bus::AgentMessage::kPair, bus::AgentMessage::kRegister, bus::AgentMessage::kArenas,
          bus::AgentMessage::kCommit, bus::AgentMessage::kClose, bus::AgentMessage::kStop,
          bus::AgentMessage::kInterrupt}) {
      const Stranger early;
      early.send(type, std::vector<std::byte>(64));
      REQUIRE_HERE(refused(early));
    }
    {
      const Stranger generous;
      std::vector<int> fds(kMaxFdsPerMessage, generous.socket().get());
      const uint32_t header[] = {bus::kAgentMagic, 0x00010001, 1000, 0};  // which announces none of them
      (void)send_some(generous.socket().get(), std::as_bytes(std::span(header)), fds);
      REQUIRE_HERE(refused(generous));
    }
    std::optional<Stranger> slow(std::in_place);
    const uint32_t half[] = {bus::kAgentMagic, 0x00010001};
    slow->send_bytes(std::as_bytes(std::span(half)));
    {
      Bus(worker_of("trainer", store));
    }
    slow.reset();
    const Deadline deadline = Deadline::after(hang_limit());
    while (descriptors_of(agent) > before && !deadline.passed()) std::this_thread::yield();
    REQUIRE_HERE(descriptors_of(agent) <= before);
    return 0;
  });
  agents.wait(2 * hang_limit());
}

// A registration whose caller has gone before it was answered does not keep its name.
TEST(Agent, ClosesABatchThatNobodyWaitsFor) {
  ProcessGroup group;
  const std::string store = group.start_store();
  AgentGroup agents(group);
  const Signal over;
  agents.start_agent("inference", 0);
  agents.start("inference/0", [&, store] {
    const Side side = inference(0, 1);
    bus::AgentSession session(bus::complete(worker_of("inference", store)));
    const auto paired = session.call<bus::Paired>(
        bus::AgentMessage::kPair,
        bus::PairCall{.session = session.number(), .options = {.name = "weights", .peer = "trainer"}},
        std::chrono::seconds(5));
    const SharedBuffer memory = SharedHeap::process().allocate(local_tensor(side).size() * sizeof(float));
    const TensorSpec spec{
        .name = side.name, .data = memory.data(), .shape = side.shape, .layout = Layout::parse(side.layout)};
    const bus::Manifest manifest = bus::manifest_of(session.identity(), {&spec, 1});
    const bus::MemoryPlacement placement =
        bus::place_tensors(manifest, {&spec, 1}, bus::registered_tensors(manifest, {&spec, 1}, 0), false);
    const bus::RegisterCall call{.session = session.number(),
                                 .pair = paired.pair,
                                 .batch = "policy",
                                 .timeout = std::chrono::seconds(5),
                                 .options = {},
                                 .tensors = placement.tensors};
    {
      const Stranger hasty("inference");
      FrameWriter writer(bus::kAgentMagic, bus::kAgentProtocol, 1 << 20);
      std::vector<UniqueFd> fds;
      fds.push_back(duplicate_fd(placement.arenas.front()->fd_for_agent()));
      writer.push(static_cast<uint16_t>(bus::AgentMessage::kArenas),
                  message_bytes(bus::Arenas{.session = session.number()}), std::move(fds));
      writer.push(static_cast<uint16_t>(bus::AgentMessage::kRegister), message_bytes(call));
      writer.flush(hasty.socket().get(), Deadline::after(hang_limit()));
    }
    const int fd = placement.arenas.front()->fd_for_agent();
    const Deadline deadline = Deadline::after(hang_limit());
    for (bool registered = false; !registered; std::this_thread::yield()) {
      REQUIRE_HERE(!deadline.passed());
      try {
        session.call<bus::Registered>(bus::AgentMessage::kRegister, call, call.timeout, {&fd, 1});
        registered = true;
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kAlreadyExists && error.code() != ErrorCode::kPeerLost) throw;
      }
    }
    over.raise();
    return 0;
  });
  agents.start("trainer/0", [&, store] {
    return with_batch(trainer(0, 1), store, [&](Batch&, std::vector<float>&) {
      over.wait();
      return 0;
    });
  });
  agents.wait(2 * hang_limit());
}

TEST(Agent, OfAnotherReleaseIsNamedWithBoth) {
  ProcessGroup group;
  AgentGroup agents(group);
  agents.start_agent("trainer", 0);
  agents.start("a worker", [] {
    const Stranger newer;
    const bus::OpenSession open{.protocol_min = bus::kAgentProtocol + 1,
                                .protocol_max = bus::kAgentProtocol + 2,
                                .release = "99.1",
                                .worker = Incarnation::self(),
                                .options = {.job = "trainer", .rank = 0, .world = 1}};
    newer.send(bus::AgentMessage::kOpen, message_bytes(open), 1);
    const std::string why = newer.refusal();
    std::fprintf(stderr, "%s\n", why.c_str());
    REQUIRE_HERE(why.find(fmt::format("the agent is release {}", kVersion)) != std::string::npos);
    REQUIRE_HERE(why.find(fmt::format("the worker release 99.1 with protocols {} to {}", open.protocol_min,
                                      open.protocol_max)) != std::string::npos);
    return 0;
  });
  agents.wait(hang_limit());
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
