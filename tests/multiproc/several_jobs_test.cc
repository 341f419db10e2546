// One job that feeds several: each with its own layout, world, pace and failures.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "tests/support/fixture.h"

namespace tessera::test {
namespace {

constexpr Timeout kLong = std::chrono::seconds(120);  // no wait of a test that goes well takes as long

BatchPeer peer_of(const Batch& batch, const std::string& job) {
  const std::vector<BatchPeer> peers = batch.peers();
  const auto it = std::ranges::find(peers, job, &BatchPeer::job);
  return it == peers.end() ? BatchPeer{.error = Status(ErrorCode::kNotFound, job)} : *it;
}

class SeveralJobs : public JobsTest, public testing::WithParamInterface<Mode> {
 protected:
  // A rank of the trainer that feeds both engines.
  static Side feeder(Rank rank) {
    Side side = trainer(rank);
    side.peers = {"engine1", "engine0"};  // in any order
    side.rendezvous = kLong;
    side.options = {.mode = GetParam(), .grace = kLong};
    return side;
  }
  static Side engine(const std::string& job, Rank rank, int world, const std::string& layout) {
    return {.job = job, .peer = "trainer", .rank = rank, .world = world, .layout = layout, .rendezvous = kLong};
  }
  static std::vector<Side> engine0() { return {engine("engine0", 0, 2, "2:S1"), engine("engine0", 1, 2, "2:S1")}; }
  static std::vector<Side> engine1() {
    return {engine("engine1", 0, 3, "3:S0"), engine("engine1", 1, 3, "3:S0"), engine("engine1", 2, 3, "3:S0")};
  }

  using EngineBody = std::function<int(const Side& side, Batch& batch, std::vector<float>& tensor)>;
  std::vector<pid_t> start_engine(const std::vector<Side>& sides, const EngineBody& body) {
    std::vector<pid_t> pids;
    for (const Side& side : sides)
      pids.push_back(start(side, [=](Batch& batch, std::vector<float>& tensor) { return body(side, batch, tensor); }));
    return pids;
  }
  // Takes `last` and, unless somebody else delays it, every version before it; tells the trainer's ranks of each.
  EngineBody takes_all(int64_t last) {
    return [this, last](const Side& side, Batch& batch, std::vector<float>& tensor) {
      for (int64_t version = 1; version <= last; ++version) {
        REQUIRE_HERE(batch.recv({}, kLong).wait() == version && holds(side, tensor, version));
        for (const Signal& taken : taken_) taken.raise();
      }
      return 0;
    };
  }
  // Sends the next version, and returns once both ranks of engine0 have it.
  int send(const Side& side, Batch& batch, std::vector<float>& tensor) {
    const int64_t version = batch.version() + 1;
    fill(side, tensor, version);
    REQUIRE_HERE(batch.send(version, kLong).wait() == version);
    for (int i = 0; i < 2; ++i) taken_[static_cast<size_t>(side.rank)].wait();
    return 0;
  }

  const std::array<Signal, 2> taken_;  // by the trainer's rank
};

std::string name_of(const testing::TestParamInfo<Mode>& mode) {
  return mode.param == Mode::kStaged ? "Staged" : "InPlace";
}
INSTANTIATE_TEST_SUITE_P(, SeveralJobs, testing::Values(Mode::kInPlace, Mode::kStaged), name_of);

TEST_P(SeveralJobs, EachTakesEveryVersionInItsOwnLayoutAndWorld) {
  constexpr int64_t kLast = 10;
  const std::array<Signal, 2> also_taken;
  for (const Rank rank : {0, 1})
    start(feeder(rank), [&, rank](Batch& batch, std::vector<float>& tensor) {
      batch.wait_peers(2, 0, kLong);
      for (int64_t version = 1; version <= kLast; ++version) {
        REQUIRE_HERE(send(feeder(rank), batch, tensor) == 0);
        for (int i = 0; i < 3; ++i) also_taken[static_cast<size_t>(rank)].wait();
      }
      batch.wait_peers(2, kLast, kLong);  // they say so a little later than they have it
      const BatchStats stats = batch.stats();
      REQUIRE_HERE(stats.sessions == 2 && stats.transfers == kLast && stats.allocations == 0);
      const int64_t copy = 4096 * ((64 / 2 * 48 * 4 + 4095) / 4096);
      REQUIRE_HERE(stats.snapshot_bytes == (GetParam() == Mode::kStaged ? 2 * copy : 0));  // not once a job
      for (const BatchPeer& peer : batch.peers()) REQUIRE_HERE(peer.version == kLast);     // it may have left by now
      REQUIRE_HERE(peer_of(batch, "engine0").world == 2 && peer_of(batch, "engine1").world == 3);
      return 0;
    });
  start_engine(engine0(), takes_all(kLast));
  start_engine(engine1(), [&](const Side& side, Batch& batch, std::vector<float>& tensor) {
    for (int64_t version = 1; version <= kLast; ++version) {
      REQUIRE_HERE(batch.recv({}, kLong).wait() == version && holds(side, tensor, version));
      for (const Signal& taken : also_taken) taken.raise();
    }
    return 0;
  });
  expect_all_well(3 * hang_limit());
}

// What happens to engine1 while engine0 takes every version; then it is back, with a world of one rank.
enum class Trouble : uint8_t { kAbsent, kStopped, kKilled, kLeft };
class SeveralJobsInTrouble : public SeveralJobs {
 protected:
  static constexpr int64_t kBefore = 3;  // versions
  static constexpr int64_t kMeanwhile = 8;
  static constexpr int64_t kLast = 9;

  void befall(Trouble trouble) {
    const Signal before, go[2], meanwhile, back[2], have[2], leave;
    const bool there = trouble != Trouble::kAbsent;
    for (const Rank rank : {0, 1})
      start(feeder(rank), [&, rank](Batch& batch, std::vector<float>& tensor) {
        const Side side = feeder(rank);
        batch.wait_peers(there ? 2 : 1, 0, kLong);
        while (batch.version() < kBefore) REQUIRE_HERE(send(side, batch, tensor) == 0);
        before.raise();
        go[rank].wait();
        while (batch.version() < kMeanwhile) REQUIRE_HERE(send(side, batch, tensor) == 0);
        batch.wait_peers(1, kMeanwhile, kLong);
        const BatchPeer troubled = peer_of(batch, "engine1");
        REQUIRE_HERE(troubled.version <= kBefore && peer_of(batch, "engine0").version == kMeanwhile);
        if (trouble == Trouble::kAbsent) REQUIRE_HERE(!troubled.attached && troubled.error.ok());
        if (trouble == Trouble::kKilled)
          REQUIRE_HERE(!troubled.attached && troubled.error.code() == ErrorCode::kPeerLost);
        meanwhile.raise();
        back[rank].wait();
        batch.wait_peers(2, 0, kLong);
        REQUIRE_HERE(send(side, batch, tensor) == 0);
        REQUIRE_HERE(GetParam() == Mode::kStaged || peer_of(batch, "engine1").version == kLast);
        const int ranks = trouble == Trouble::kStopped ? 3 : 1;  // of engine1, now
        for (int i = 0; i < ranks; ++i) have[rank].wait();
        for (int i = 0; i < ranks; ++i)
          if (rank == 0) leave.raise();
        return 0;
      });
    start_engine(engine0(), takes_all(kLast));
    std::vector<pid_t> pids;
    if (there)
      pids = start_engine(engine1(), [&](const Side& side, Batch& batch, std::vector<float>& tensor) {
        while (batch.version() < kBefore) batch.recv({}, kLong).wait();
        if (trouble == Trouble::kLeft) return 0;
        while (batch.version() < kLast) {
          // The transfer in progress when it was stopped has failed.
          if (!went_well([&] { batch.recv({}, kLong).wait(); })) continue;
          REQUIRE_HERE(holds(side, tensor, batch.version()));
        }
        for (const Signal& one : have) one.raise();
        leave.wait();  // once all ranks have it
        return 0;
      });
    for (int i = 0; i < 2; ++i) before.wait();
    for (const pid_t pid : pids) {
      if (trouble == Trouble::kStopped) stop_process(pid);
      if (trouble == Trouble::kKilled) group_.kill(pid, SIGKILL);
      if (trouble != Trouble::kStopped) of(pid);
    }
    for (const Signal& one : go) one.raise();
    for (int i = 0; i < 2; ++i) meanwhile.wait();
    if (trouble == Trouble::kStopped) {
      for (const pid_t pid : pids) group_.kill(pid, SIGCONT);
    } else {
      const Side side = engine("engine1", 0, 1, "1:R");
      start(side, [=, &leave, &have](Batch& batch, std::vector<float>& tensor) {
        while (batch.version() < kLast) {
          batch.recv({}, kLong).wait();
          REQUIRE_HERE(holds(side, tensor, batch.version()));
        }
        for (const Signal& one : have) one.raise();
        leave.wait();
        return 0;
      });
    }
    for (const Signal& one : back) one.raise();
    expect_all_well(3 * hang_limit());
  }
};
INSTANTIATE_TEST_SUITE_P(, SeveralJobsInTrouble, testing::Values(Mode::kInPlace, Mode::kStaged), name_of);

TEST_P(SeveralJobsInTrouble, OneThatIsAbsentDelaysNobodyAndMayComeLate) {
  befall(Trouble::kAbsent);
}
TEST_P(SeveralJobsInTrouble, OneThatIsStoppedDelaysNobodyAndGoesOn) {
  befall(Trouble::kStopped);
}
TEST_P(SeveralJobsInTrouble, OneThatIsKilledDelaysNobodyAndComesBackWithAnotherWorld) {
  befall(Trouble::kKilled);
}
TEST_P(SeveralJobsInTrouble, OneThatLeavesDelaysNobodyAndComesBackWithAnotherWorld) {
  befall(Trouble::kLeft);
}

using OneJobToSeveral = JobsTest;

// In place: a job that is attached and does not take part is waited for once.
TEST_F(OneJobToSeveral, OneThatDoesNotComeIsWaitedForOnceUntilItTakesAVersion) {
  constexpr Timeout kGrace = std::chrono::seconds(3);
  const Signal comes, leave;
  Side side = trainer(0, 1);
  side.peers = {"engine0", "engine1"};
  side.options.grace = kGrace;
  start(side, [&](Batch& batch, std::vector<float>& tensor) {
    batch.wait_peers(2, 0, kLong);
    fill(side, tensor, 1);
    REQUIRE_HERE(batch.send(1, kLong).wait() == 1);
    const BatchPeer late = peer_of(batch, "engine1");
    REQUIRE_HERE(late.attached && late.version == 0 && late.error.code() == ErrorCode::kDeadlineExceeded);
    REQUIRE_HERE(late.error.message().find("all others have it, and engine1/0 did not come to take it") !=
                 std::string::npos);
    REQUIRE_HERE(peer_of(batch, "engine0").error.ok());
    const TimePoint begin = Clock::steady().now();
    int64_t version = 1;
    while (version < 100) {
      fill(side, tensor, ++version);
      REQUIRE_HERE(batch.send(version, kLong).wait() == version);
    }
    REQUIRE_HERE(Clock::steady().now() - begin < 99 * kGrace / 10);
    comes.raise();
    while (peer_of(batch, "engine1").version == 0) {
      fill(side, tensor, ++version);
      REQUIRE_HERE(batch.send(version, kLong).wait() == version);
    }
    REQUIRE_HERE(peer_of(batch, "engine1").error.ok());
    leave.raise();
    return 0;
  });
  const auto engine = [](const std::string& job) {
    return Side{.job = job, .peer = "trainer", .layout = "1:R", .rendezvous = kLong};
  };
  start(engine("engine0"), [&](Batch& batch, std::vector<float>& tensor) {
    while (went_well([&] { batch.recv({}, kLong).wait(); }))  // until the trainer has closed it
      REQUIRE_HERE(holds(engine("engine0"), tensor, batch.version()));
    return 0;
  });
  start(engine("engine1"), [&](Batch& batch, std::vector<float>& tensor) {
    comes.wait();
    const int64_t version = batch.recv({}, kLong).wait();
    REQUIRE_HERE(version >= 100 && holds(engine("engine1"), tensor, version));
    leave.wait();
    return 0;
  });
  expect_all_well(3 * hang_limit());
}

// Jobs come one after another while versions are sent; the sending ranks notice them at different versions.
TEST_F(OneJobToSeveral, JobsThatComeWhileVersionsAreSentAreServed) {
  const Shared<std::atomic<int64_t>> last;  // 0: not known yet
  const Signal done[2];
  for (const Rank rank : {0, 1}) {
    Side side = trainer(rank);
    side.peers = {"engine0", "engine1", "engine2"};
    start(side, [=, &last, &done](Batch& batch, std::vector<float>& tensor) {
      int64_t version = 0;
      while (*last == 0 || version < *last) {
        fill(side, tensor, ++version);
        REQUIRE_HERE(batch.send(version, kLong).wait() == version);
        const std::vector<BatchPeer> peers = batch.peers();
        const bool all = std::ranges::all_of(peers, [](const BatchPeer& peer) { return peer.version > 0; });
        if (rank == 0 && all && *last == 0) *last = version + 3;  // the other rank may be one ahead
      }
      done[1 - rank].raise();
      done[rank].wait();
      return 0;
    });
  }
  for (const std::string job : {"engine0", "engine1", "engine2"})
    for (const Rank rank : {0, 1}) {
      const Side side{.job = job, .peer = "trainer", .rank = rank, .world = 2, .layout = "2:S1", .rendezvous = kLong};
      start(side, [=](Batch& batch, std::vector<float>& tensor) {
        while (went_well([&] { batch.recv({}, kLong).wait(); }))  // until the trainer has closed it
          REQUIRE_HERE(holds(side, tensor, batch.version()));
        REQUIRE_HERE(batch.version() > 0);
        return 0;
      });
    }
  expect_all_well(3 * hang_limit());
}

// A job joins the batch of one bus and is then named by another bus of the same process, whose batch has the same name.
TEST_F(OneJobToSeveral, AJobGoesOverToTheBatchThatNamesIt) {
  Side side = trainer(0, 1);
  const Signal taken;
  start("trainer/0", [&] {
    std::vector<float> tensors[2] = {local_tensor(side), local_tensor(side)};
    std::vector<Bus> buses;
    std::vector<Pair> pairs;
    std::vector<Batch> batches;
    side.options.mode = Mode::kStaged;
    for (const int i : {0, 1}) {
      buses.emplace_back(BusOptions{.job = "trainer", .store = store_});
      pairs.push_back(buses.back().pair({.name = "weights", .peers = {i == 0 ? "engine0" : "engine1"}}));
      batches.push_back(register_tensor(pairs.back(), side, tensors[i].data()));
      const int64_t version = i == 0 ? 3 : 5;
      fill(side, tensors[i], version);
      batches.back().send(version, kLong).wait();
      batches.back().wait_peers(i == 0 ? 2 : 1, version, kLong);
    }
    const std::vector<BatchPeer> peers = batches[0].peers();
    REQUIRE_HERE(peers.size() == 1 && peers[0].job == "engine0" && peers[0].version == 3);
    REQUIRE_HERE(fails_with([&] { register_tensor(pairs[1], side, tensors[1].data()); }, ErrorCode::kAlreadyExists,
                            "batch policy of pair weights with job engine1 already"));
    return 0;
  });
  for (const std::string job : {"engine0", "engine1"}) {
    const Side engine{.job = job, .peer = "trainer", .layout = "1:R", .rendezvous = kLong};
    start(engine, [=](Batch& batch, std::vector<float>& tensor) {
      const int64_t last = job == "engine0" ? 3 : 5;
      while (batch.version() < last)
        if (went_well([&] { batch.recv({}, kLong).wait(); })) REQUIRE_HERE(holds(engine, tensor, batch.version()));
      return 0;
    });
  }
  expect_all_well(3 * hang_limit());
}

// A pair that leaves before it has registered is no loss to a job that another pair of its process names.
TEST_F(OneJobToSeveral, APairThatGoesConcernsOnlyTheJobsThatItNames) {
  const Signal joined, gone, tried;
  start("trainer/0", [&] {
    Side side = trainer(0, 1);
    side.options.mode = Mode::kStaged;
    std::vector<float> tensor = local_tensor(side);
    Bus bus({.job = "trainer", .store = store_});
    Pair pair = bus.pair({.name = "weights", .peers = {"engine0"}});
    for (int engine = 0; engine < 2; ++engine) joined.wait();
    bus.pair({.name = "weights", .peers = {"engine1"}});
    for (int engine = 0; engine < 2; ++engine) gone.raise();
    for (int engine = 0; engine < 2; ++engine) tried.wait();
    Batch batch = register_tensor(pair, side, tensor.data());
    fill(side, tensor, 1);
    batch.send(1, kLong).wait();
    batch.wait_peers(1, 1, kLong);
    return 0;
  });
  for (const std::string job : {"engine0", "engine1"})
    start(job + "/0", [=, this, &joined, &gone, &tried] {
      Side side{.job = job, .peer = "trainer", .layout = "1:R"};
      std::vector<float> tensor = local_tensor(side);
      Bus bus({.job = job, .store = store_});
      Pair pair = bus.pair({.name = "weights", .peer = "trainer"});
      joined.raise();
      gone.wait();
      const auto fails = [&](Timeout timeout, ErrorCode code, const std::string& words) {
        side.rendezvous = timeout;
        return fails_with([&] { register_tensor(pair, side, tensor.data()); }, code, words);
      };
      const bool told = job == "engine1"
                            ? fails(kLong, ErrorCode::kPeerLost, "trainer/0 left before it had registered")
                            : fails(std::chrono::seconds(1), ErrorCode::kDeadlineExceeded, "missing: trainer/0");
      tried.raise();
      REQUIRE_HERE(told);
      if (job == "engine1") return 0;
      side.rendezvous = kLong;
      Batch batch = register_tensor(pair, side, tensor.data());
      REQUIRE_HERE(batch.recv({}, kLong).wait() == 1 && holds(side, tensor, 1));
      return 0;
    });
  expect_all_well(3 * hang_limit());
}

// The last Bus of a rank releases it; until then the others go on.
TEST_F(OneJobToSeveral, ThePlaceOfARankIsSharedWithinItsProcess) {
  start("spare/0", [&] {
    const BusOptions options{.job = "spare", .store = store_, .threads = 2};
    for (int round = 0; round < 3; ++round) {
      std::optional<Bus> one(options);
      std::optional<Bus> two(options);
      const Footprint both = Footprint::now();
      std::optional<Bus> three(BusOptions{.job = "spare", .store = store_});
      REQUIRE_HERE(Footprint::now() == both);
      REQUIRE_HERE(fails_with([&] { Bus(BusOptions{.job = "spare", .world = 2, .store = store_}); },
                              ErrorCode::kInvalidArgument, "world 2: this process is on the bus as spare/0"));
      REQUIRE_HERE(fails_with([&] { Bus(BusOptions{.job = "spare", .store = store_, .threads = 3}); },
                              ErrorCode::kInvalidArgument, "threads 3: this process is on the bus as spare/0 with 2"));
      one.reset();
      two->interrupt();
      three.reset();
      REQUIRE_HERE(two->alive());
    }
    const Bus other_world({.job = "spare", .world = 2, .store = store_});  // they have gone
    std::vector<std::jthread> threads;
    std::atomic<int> well = 0;
    for (int i = 0; i < 8; ++i)
      threads.emplace_back([&] {
        for (int round = 0; round < 10; ++round) {
          const Bus mine({.job = "busy", .store = store_});
          ++well;
        }
      });
    threads.clear();
    REQUIRE_HERE(well == 80);
    return 0;
  });
  expect_all_well(3 * hang_limit());
}

TEST_F(OneJobToSeveral, ADaemonFeedsSeveralJobs) {
  Side side = with_agent(trainer(0, 1));
  side.peers = {"engine0", "engine1", "absent"};
  start_agent(side);
  start(side, [&](Batch& batch, std::vector<float>& tensor) {
    batch.wait_peers(2, 0, kLong);
    for (int64_t version = 1; version <= 3; ++version) {
      fill(side, tensor, version);
      batch.send(version, kLong).wait();
    }
    REQUIRE_HERE(fails_with([&] { batch.wait_peers(3, 3, Timeout(0)); }, ErrorCode::kDeadlineExceeded,
                            "for 3 jobs to take version 3: 2 so far; missing: job absent"));
    const std::vector<BatchPeer> peers = batch.peers();
    REQUIRE_HERE(peers.size() == 3 && peers[0].job == "absent" && !peers[0].attached && peers[0].version == 0);
    REQUIRE_HERE(peers[1].job == "engine0" && peers[1].version == 3 && peers[1].world == 1);
    return 0;
  });
  for (const std::string job : {"engine0", "engine1"}) {
    const Side engine{.job = job, .peer = "trainer", .layout = "1:R", .rendezvous = kLong};
    start(engine, [=](Batch& batch, std::vector<float>& tensor) {
      while (batch.version() < 3) {
        batch.recv({}, kLong).wait();
        REQUIRE_HERE(holds(engine, tensor, batch.version()));
      }
      return 0;
    });
  }
  expect_all_well(3 * hang_limit());
}

}  // namespace
}  // namespace tessera::test
