// The last version of a run: a sender that closes its batch waits for who has not taken it yet, and says who has not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <array>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "base/clock.h"
#include "tests/support/fixture.h"

namespace tessera::test {
namespace {

constexpr Timeout kLong = std::chrono::seconds(120);  // no close of a test that goes well takes as long
constexpr Timeout kShort = std::chrono::milliseconds(200);
constexpr int64_t kLast = 2;

// Closes the batch; returns whether that took nothing like kLong.
bool closes_soon(Batch& batch, const Untaken& expected = {}) {
  const TimePoint start = Clock::steady().now();
  const Untaken untaken = batch.close(kLong);
  const Duration took = Clock::steady().now() - start;
  std::fprintf(stderr, "closed after %.2f s; version %lld is left\n", to_seconds(took),
               static_cast<long long>(untaken.version));
  return took < hang_limit() / 2 && untaken.version == expected.version && untaken.jobs == expected.jobs;
}

// The sender's mode, whether agent daemons move its data, and one of a test's ways.
using Way = std::tuple<Mode, bool, int>;

class Linger : public JobsTest, public testing::WithParamInterface<Way> {
 protected:
  Linger() {
    if (!std::get<bool>(GetParam())) return;
    for (const Rank rank : {0, 1}) start_agent(sender(rank));
  }
  static bool stages() { return std::get<Mode>(GetParam()) == Mode::kStaged; }
  static int way() { return std::get<int>(GetParam()); }
  static Side sender(Rank rank, int world = 2) {
    Side side = trainer(rank, world);
    side.options.mode = std::get<Mode>(GetParam());
    return std::get<bool>(GetParam()) ? with_agent(side) : side;
  }
  // Sends a version that somebody is still to take once the call returns.
  static Handle offer(const Side& side, Batch& batch, std::vector<float>& tensor, int64_t version) {
    fill(side, tensor, version);
    Handle handle = batch.send(version, kLong);
    if (stages()) handle.wait();
    return handle;
  }
};

std::string name_of(const testing::TestParamInfo<Way>& param) {
  const auto& [mode, daemon, way] = param.param;
  return std::string(mode == Mode::kStaged ? "Staged" : "InPlace") + (daemon ? "Daemon" : "Embedded") +
         std::to_string(way);
}
template <typename... Ways>
auto ways(Ways... ways) {
  return testing::Combine(testing::Values(Mode::kInPlace, Mode::kStaged), testing::Values(false, true),
                          testing::Values(ways...));
}

// Receivers come once both senders close, one after the other. Way: the receivers' mode.
using LingerForReceivers = Linger;
TEST_P(LingerForReceivers, WhoComesWhileASenderClosesGetsTheLastVersion) {
  const Mode mode = way() == 0 ? Mode::kInPlace : Mode::kStaged;
  const std::array<Signal, 2> closes;
  const Signal first;
  for (const Rank rank : {0, 1})
    start(sender(rank), [&, rank](Batch& batch, std::vector<float>& tensor) {
      offer(sender(rank), batch, tensor, 1).wait();
      const Handle handle = offer(sender(rank), batch, tensor, kLast);
      for (int i = 0; i < 2; ++i) closes[static_cast<size_t>(rank)].raise();
      return closes_soon(batch) ? 0 : 1;
    });
  for (const Rank rank : {0, 1}) {
    Side side = inference(rank);
    side.options.mode = mode;
    start(side, [&, side, rank, mode](Batch& batch, std::vector<float>& tensor) {
      REQUIRE_HERE(batch.recv({}, kLong).wait() >= 1);
      for (const Signal& signal : closes) signal.wait();
      if (batch.version() == kLast) return 0;  // it may have been there by the first call
      if (rank == 1 && mode == Mode::kInPlace) first.wait();
      REQUIRE_HERE(batch.recv(kLast, kLong).wait() == kLast && holds(side, tensor, kLast));
      if (rank == 0 && mode == Mode::kInPlace) first.raise();
      return 0;
    });
  }
  expect_all_well();
}
INSTANTIATE_TEST_SUITE_P(, LingerForReceivers, ways(0, 1), name_of);

// Way: whether it waits.
using LingerForNobody = Linger;
TEST_P(LingerForNobody, WhatIsNotTakenIsNamed) {
  const Signal closed;
  const pid_t closes = start(sender(0, 1), [&](Batch& batch, std::vector<float>& tensor) {
    const Handle handle = offer(sender(0, 1), batch, tensor, kLast);
    const Untaken untaken = batch.close(way() == 0 ? Timeout(0) : kShort);
    closed.raise();
    REQUIRE_HERE(untaken.version == kLast && untaken.jobs == std::vector<std::string>{"inference"});
    REQUIRE_HERE(batch.close().version == 0);  // it is closed
    return 0;
  });
  start(inference(0, 1), [&](Batch&, std::vector<float>&) {
    closed.wait();
    return 0;
  });
  const Outcome& outcome = of(closes);
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  const bool warns = outcome.output.find("job inference has not taken version 2 within 0.2 s") != std::string::npos;
  EXPECT_EQ(warns, way() != 0 && !std::get<bool>(GetParam())) << outcome.output;  // agents log it themselves
  expect_all_well();
}
INSTANTIATE_TEST_SUITE_P(, LingerForNobody, ways(0, 1), name_of);

enum { kNothingSent, kTaken, kWithdrawn };
using LingerForNothing = Linger;
TEST_P(LingerForNothing, ItIsOverAtOnce) {
  const Signal closed;
  start(sender(0, 1), [&](Batch& batch, std::vector<float>& tensor) {
    std::optional<Handle> handle;
    if (way() != kNothingSent) handle = offer(sender(0, 1), batch, tensor, 1);
    if (way() == kTaken) {
      handle->wait();
      batch.wait_peers(1, 1, kLong);
    }
    if (way() == kWithdrawn) REQUIRE_HERE(handle->withdraw());
    const bool soon = closes_soon(batch);
    closed.raise();
    return soon ? 0 : 1;
  });
  start(inference(0, 1), [&](Batch& batch, std::vector<float>&) {
    if (way() == kTaken) batch.recv({}, kLong).wait();
    closed.wait();
    return 0;
  });
  expect_all_well();
}
INSTANTIATE_TEST_SUITE_P(, LingerForNothing, ways(+kNothingSent, +kTaken, +kWithdrawn), name_of);

// Way: the signal that ends the receiver; 0: it closes the batch, and its process goes on.
using LingerForTheLost = Linger;
TEST_P(LingerForTheLost, WhoLeavesIsNotWaitedFor) {
  const Signal offered, over;
  const pid_t closes = start(sender(0, 1), [&](Batch& batch, std::vector<float>& tensor) {
    const Handle handle = offer(sender(0, 1), batch, tensor, 1);
    offered.raise();
    const bool soon = closes_soon(batch);
    over.raise();
    return soon ? 0 : 1;
  });
  const pid_t leaves = start(inference(0, 1), [&](Batch& batch, std::vector<float>&) {
    offered.wait();
    if (way() != 0) return ::raise(way());
    batch.close();
    over.wait();
    return 0;
  });
  EXPECT_EQ(of(closes).status, 0) << of(closes).output;
  if (way() == SIGSTOP) ::kill(leaves, SIGKILL);
  EXPECT_EQ(of(leaves).status, way() == 0 ? 0 : -SIGKILL);
  expect_all_well();
}
INSTANTIATE_TEST_SUITE_P(, LingerForTheLost, ways(0, SIGKILL, SIGSTOP), name_of);

TEST_P(Linger, ASecondCloseEndsTheFirstAndNoSendBeginsMeanwhile) {
  const Signal closed;
  start(sender(0, 1), [&](Batch& batch, std::vector<float>& tensor) {
    const Handle handle = offer(sender(0, 1), batch, tensor, 1);
    bool soon = false;
    std::thread lingers([&] { soon = closes_soon(batch); });
    while (!fails_with([&] { batch.send({}, kShort); }, ErrorCode::kCancelled, "closed it")) std::this_thread::yield();
    batch.close(Timeout(0));
    lingers.join();
    closed.raise();
    return soon ? 0 : 1;
  });
  start(inference(0, 1), [&](Batch&, std::vector<float>&) {
    closed.wait();
    return 0;
  });
  expect_all_well();
}
INSTANTIATE_TEST_SUITE_P(, Linger,
                         testing::Combine(testing::Values(Mode::kInPlace, Mode::kStaged), testing::Values(false),
                                          testing::Values(0)),
                         name_of);

// The destructor closes as close() does, unless (way 1) an exception unwinds the stack.
using LingerOfTheDropped = Linger;
TEST_P(LingerOfTheDropped, ItWaitsUnlessAnExceptionDropsIt) {
  const Signal offered, over;
  Side side = sender(0, 1);
  side.rendezvous = kLong;  // and so it lingers
  start(side, std::function<int(Pair&)>([&, side](Pair& pair) {
          std::vector<float> tensor = local_tensor(side);
          std::optional<Handle> handle;
          const TimePoint start = Clock::steady().now();
          try {
            Batch batch = register_tensor(pair, side, tensor.data());
            handle = offer(side, batch, tensor, 1);
            offered.raise();
            if (way() == 1) throw std::runtime_error("of its own");
          } catch (const std::runtime_error& error) {
            std::fprintf(stderr, "%s\n", error.what());
          }
          over.raise();
          return Clock::steady().now() - start < hang_limit() / 2 ? 0 : 1;
        }));
  start(inference(0, 1), [&](Batch& batch, std::vector<float>& tensor) {
    (way() == 0 ? offered : over).wait();
    if (way() == 0) REQUIRE_HERE(batch.recv({}, kLong).wait() == 1 && holds(inference(0, 1), tensor, 1));
    return 0;
  });
  expect_all_well();
}
INSTANTIATE_TEST_SUITE_P(, LingerOfTheDropped,
                         testing::Combine(testing::Values(Mode::kInPlace, Mode::kStaged), testing::Values(false),
                                          testing::Values(0, 1)),
                         name_of);

// Several jobs: each that is attached.
class LingerForSeveral : public JobsTest, public testing::WithParamInterface<Mode> {};
INSTANTIATE_TEST_SUITE_P(, LingerForSeveral, testing::Values(Mode::kInPlace, Mode::kStaged),
                         [](const auto& mode) { return mode.param == Mode::kStaged ? "Staged" : "InPlace"; });

TEST_P(LingerForSeveral, EachThatIsAttachedIsWaitedFor) {
  Side feeder = trainer(0, 1);
  feeder.peers = {"engine0", "engine1", "nobody"};
  feeder.options = {.mode = GetParam(), .snapshots = 3, .grace = kLong};
  const Signal closes, first, there;
  start(feeder, [&](Batch& batch, std::vector<float>& tensor) {
    batch.wait_peers(3, 0, kLong);
    fill(feeder, tensor, 1);
    Handle handle = batch.send(1, kLong);
    if (GetParam() == Mode::kStaged) handle.wait();
    there.raise();
    closes.raise();
    return closes_soon(batch) ? 0 : 1;
  });
  for (const char* job : {"engine0", "engine1", "engine2"}) {  // the last one comes although nobody has named it
    const Side side{.job = job, .peer = "trainer", .rank = 0, .world = 1, .layout = "1:R", .rendezvous = kLong};
    start(side, [&, side](Batch& batch, std::vector<float>& tensor) {
      if (side.job == "engine0") closes.wait();
      if (side.job == "engine1") first.wait();
      if (side.job == "engine2") {
        there.wait();
        return 0;  // it leaves
      }
      REQUIRE_HERE(batch.recv({}, kLong).wait() == 1 && holds(side, tensor, 1));
      if (side.job == "engine0") first.raise();
      return 0;
    });
  }
  expect_all_well();
}

}  // namespace
}  // namespace tessera::test
