// Ranks of one side that do different things at the same time: late ones, those that want other versions, those that
// take long, those that were replaced. The following calls succeed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <string>
#include <thread>

#include "base/clock.h"
#include "base/fail_point.h"
#include "tests/support/fixture.h"

namespace tessera::test {
namespace {

using std::chrono::milliseconds;

constexpr Timeout kShort = milliseconds(700);

int threads_now() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("Threads:")) return std::stoi(line.substr(8));
  return 0;
}

// A version 1 that nobody takes in time.
bool fails_at_first(Batch& batch, std::vector<float>& tensor) {
  fill(trainer(0, 1), tensor, 1);
  return !went_well([&] { batch.send(1, kShort).wait(); });
}

// Rank 0 takes that version; the other rank comes once the send has failed.
void come_late(Batch& batch, Rank rank, const Signal& failed) {
  if (rank == 0) return static_cast<void>(batch.recv({}, kPatience).wait());
  failed.wait();
}

using Collective = JobsTest;

// Rank 0 of the receivers has taken the version, rank 1 comes too late for it.
TEST_F(Collective, AReceivingRankThatWasLateForAVersionTakesTheNext) {
  const Signal failed;
  Barrier over;
  start(trainer(0, 1), [&](Batch& batch, std::vector<float>& tensor) {
    REQUIRE_HERE(fails_at_first(batch, tensor));
    failed.raise();
    for (const int64_t version : {2, 3}) {
      fill(trainer(0, 1), tensor, version);
      batch.send(version, kPatience).wait();
    }
    over.pass();
    return 0;
  });
  for (const Rank rank : {0, 1})
    start(inference(rank), [&, rank](Batch& batch, std::vector<float>& tensor) {
      come_late(batch, rank, failed);
      for (const int64_t version : {2, 3}) {
        while (batch.version() < version) batch.recv(version, kPatience).wait();
        REQUIRE_HERE(holds(inference(rank), tensor, version));
      }
      over.pass();
      return 0;
    });
  over.open();
  expect_all_well();
}

// The same version again, as a failed send may be repeated: the rank that has it takes it again.
TEST_F(Collective, AVersionThatOneReceivingRankHasTakenMayBeSentAgain) {
  const Signal failed;
  Barrier over;
  start(trainer(0, 1), [&](Batch& batch, std::vector<float>& tensor) {
    REQUIRE_HERE(fails_at_first(batch, tensor));
    failed.raise();
    batch.send(1, kPatience).wait();
    over.pass();
    return 0;
  });
  for (const Rank rank : {0, 1})
    start(inference(rank), [&, rank](Batch& batch, std::vector<float>& tensor) {
      come_late(batch, rank, failed);
      batch.recv({}, kPatience).wait();
      REQUIRE_HERE(batch.version() == 1 && holds(inference(rank), tensor, 1));
      over.pass();
      return 0;
    });
  over.open();
  expect_all_well();
}

class Minimum : public JobsTest, public testing::WithParamInterface<Mode> {};

// One call with different minima is an error at the rank that wants more; the next calls go well.
TEST_P(Minimum, ThatIsNotTheSameEndsThatCallAlone) {
  Barrier over, differed;
  Side sends = trainer(0, 1);
  sends.options.mode = GetParam();
  start(sends, [&](Batch& batch, std::vector<float>& tensor) {
    fill(sends, tensor, 1);
    try {
      batch.send(1, kPatience).wait();
    } catch (const Error& error) {
      REQUIRE_HERE(error.code() == ErrorCode::kMismatch);
    }
    differed.pass();
    fill(sends, tensor, 5);
    batch.send(5, kPatience).wait();
    over.pass();
    return 0;
  });
  for (const Rank rank : {0, 1}) {
    Side side = inference(rank);
    side.options.mode = GetParam();
    start(side, [&, side, rank](Batch& batch, std::vector<float>& tensor) {
      Status status;
      try {
        batch.recv(rank == 0 ? 1 : 4, kPatience).wait();
      } catch (const Error& error) {
        status = Status(error.code(), error.what());
      }
      if (rank == 1) REQUIRE_HERE(status.code() == ErrorCode::kMismatch);
      if (rank == 0 && GetParam() == Mode::kStaged) REQUIRE_HERE(!status.ok());
      differed.pass();
      while (batch.version() < 5) batch.recv({}, kPatience).wait();
      REQUIRE_HERE(holds(side, tensor, 5));
      over.pass();
      return 0;
    });
  }
  differed.open();
  over.open();
  expect_all_well();
}

INSTANTIATE_TEST_SUITE_P(All, Minimum, testing::Values(Mode::kInPlace, Mode::kStaged),
                         [](const auto& mode) { return mode.param == Mode::kInPlace ? "inplace" : "staged"; });

// The receiver registers again with a version that it has not committed yet.
TEST_F(Collective, AVersionThatIsStagedOutlastsItsSender) {
  const Signal is_staged;
  const pid_t first = start(staged(trainer(0, 1)), [&](Batch& batch, std::vector<float>& tensor) {
    fill(trainer(0, 1), tensor, 1);
    batch.send(1, kPatience).wait();
    is_staged.wait();
    return ::kill(::getpid(), SIGKILL);
  });
  Barrier over;
  start(staged(inference(0, 1)), [&](Batch& batch, std::vector<float>& tensor) {
    batch.stage({}, kPatience).wait();
    is_staged.raise();
    while (!went_well([&] { batch.wait_version(2, kAttempt); })) continue;
    batch.commit();
    REQUIRE_HERE(batch.version() == 1 && holds(inference(0, 1), tensor, 1));
    batch.recv({}, kPatience).wait();
    REQUIRE_HERE(batch.version() == 2 && holds(inference(0, 1), tensor, 2));
    over.pass();
    return 0;
  });
  EXPECT_EQ(of(first).status, -SIGKILL);
  start(staged(trainer(0, 1)), [&](Batch& batch, std::vector<float>& tensor) {
    fill(trainer(0, 1), tensor, 2);
    batch.send(2, kPatience).wait();
    over.pass();
    return 0;
  });
  over.open();
  expect_all_well();
}

// Everything except the store's answer is there; once that is, the version counts, and is not taken a second time
// although a staged sender still offers it.
TEST_F(Collective, AVersionThatWasUndecidedIsNotTakenAgain) {
  Barrier settled, over;
  const pid_t store = group_.store_pid();
  start(staged(trainer(0, 1)), [&](Batch& batch, std::vector<float>& tensor) {
    for (const int64_t version : {1, 2}) {
      fill(trainer(0, 1), tensor, version);
      batch.send(version, kPatience).wait();
      if (version == 1) std::this_thread::sleep_for(milliseconds(300));
    }
    settled.pass();
    fill(trainer(0, 1), tensor, 3);
    batch.send(3, kPatience).wait();
    over.pass();
    return 0;
  });
  for (const Rank rank : {0, 1})
    start("inference/" + std::to_string(rank), [&, rank, store] {
      static int visits = 0;
      static const pid_t stopped = store;
      if (rank == 0)
        fail_point_hook() = [](std::string_view place) {
          if (place != "staged: before the store" || ++visits != 2) return;
          stop_process(stopped);
        };
      const Side side = staged(inference(rank));
      return with_batch(side, store_, [&](Batch& batch, std::vector<float>& tensor) {
        batch.recv(1, kPatience).wait();
        try {
          batch.recv(2, kPatience).wait();
          REQUIRE_HERE(rank == 1);  // by its time the store goes on, perhaps
        } catch (const Error& error) {
          REQUIRE_HERE(error.code() == ErrorCode::kUnavailable && batch.undecided());
        }
        if (rank == 0) ::kill(store, SIGCONT);
        const int64_t sessions = batch.stats().sessions;
        while (batch.version() < 2) went_well([&] { batch.recv({}, kAttempt).wait(); });
        settled.pass();
        while (batch.version() < 3) batch.recv({}, kPatience).wait();
        REQUIRE_HERE(holds(side, tensor, 3) && batch.stats().sessions == sessions);
        over.pass();
        return 0;
      });
    });
  settled.open();
  over.open();
  expect_all_well();
}

// A rank that has its part waits for one that has much to take, as long as that makes progress: it takes longer than
// the ranks wait for one that makes none.
TEST_F(Collective, ARankThatIsDoneWaitsForOneThatMakesProgress) {
  constexpr Index kBig = Index{1} << 22;
  constexpr auto kStall = std::chrono::seconds(2);
  static constexpr int kSlowUnits = 6;
  static constexpr auto kUnitTakes = milliseconds(500);
  static_assert(kSlowUnits * kUnitTakes > kStall);
  Barrier over;
  const auto run = [&](const std::string& job, Rank rank, int world) {
    const bool sends = job == "trainer";
    static std::atomic<int> units{0};
    if (!sends && rank == 0)
      fail_point_hook() = [](std::string_view place) {
        if (place == "transfer: unit" && units++ < kSlowUnits) std::this_thread::sleep_for(kUnitTakes);
      };
    Bus bus(
        {.job = job, .rank = rank, .world = world, .store = store_, .threads = 1, .digest = false, .stall = kStall});
    Pair pair = bus.pair({.name = "weights", .peer = sends ? "inference" : "trainer"});
    const bool has_big = sends || rank == 0;
    std::vector<float> big(has_big ? kBig : 0), small(4);
    const std::vector<TensorSpec> specs{
        {.name = "big",
         .data = has_big ? big.data() : nullptr,
         .shape = {kBig},
         .layout = Layout::parse(sends ? "1:R" : "1@0:R")},
        {.name = "small", .data = small.data(), .shape = {4}, .layout = Layout::parse(sends ? "1:R" : "2:R")}};
    Batch batch =
        sends ? pair.offer("policy", specs) : pair.accept("policy", specs, kRendezvousTimeout, {.mode = Mode::kStaged});
    (sends ? batch.send({}, kPatience) : batch.recv({}, kPatience)).wait();
    if (!sends && rank == 0) REQUIRE_HERE(units >= kSlowUnits);
    over.pass();
    return 0;
  };
  start("trainer/0", [&] { return run("trainer", 0, 1); });
  for (const Rank rank : {0, 1})
    start("inference/" + std::to_string(rank), [&, rank] { return run("inference", rank, 2); });
  over.open();
  expect_all_well();
}

// Jobs that come to receive once, each under a different name.
TEST_F(Collective, JobsThatHaveLeftCostNoThreads) {
  constexpr int kJobs = 8;
  const Signal over;
  Side sends = staged(trainer(0, 1));
  sends.peer = "eval-0";
  start(sends, [&](Batch& batch, std::vector<float>& tensor) {
    fill(sends, tensor, 1);
    batch.send(1).wait();
    over.wait();
    const int before = threads_now();
    for (int i = 1; i < kJobs; ++i) over.wait();
    const Deadline deadline = Deadline::after(hang_limit());
    const int most = before + kJobs / 2;  // the meeting with the first job has one, once that job has left
    while (threads_now() > most && !deadline.passed()) std::this_thread::sleep_for(milliseconds(20));
    REQUIRE_HERE(threads_now() <= most);
    return 0;
  });
  for (int i = 0; i < kJobs; ++i) {
    const Side side{.job = "eval-" + std::to_string(i), .peer = "trainer", .layout = "1:R"};
    EXPECT_EQ(of(start(side, receive_once)).status, 0);
    over.raise();
  }
  expect_all_well();
}

}  // namespace
}  // namespace tessera::test
