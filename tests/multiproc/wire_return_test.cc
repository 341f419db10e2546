// Receiving jobs and ranks that come, leave and come back during a send of quantised tensors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <thread>

#include "base/log.h"
#include "tests/support/fixture.h"
#include "tests/support/wire_jobs.h"

namespace tessera::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using WireReturn = JobsTest;

Side evaluation() {
  return quantised({.job = "evaluation", .peer = "trainer", .rank = 0, .world = 1, .layout = "1:R"});
}

// Rank 0 sends; the others do once a job has come, or gone.
TEST_F(WireReturn, AJobThatJoinsWhileASendIsUnderWayTakesWhatItCan) {
  constexpr int64_t kLast = 100;
  const Signal under_way, joined;
  for (Rank rank = 0; rank < kWireSenders; ++rank)
    start(wire_sender(rank), [&](Batch& batch, std::vector<float>& tensor) {
      if (rank != 0) joined.wait();
      for (int64_t version = 1; version <= kLast; ++version) {
        fill(wire_sender(rank), tensor, version);
        Handle handle = batch.send(version, kPatience);
        if (version == 1 && rank == 0) under_way.raise();
        REQUIRE_HERE(handle.wait() == version);
      }
      return 0;
    });
  for (Rank rank = 0; rank < 2; ++rank)
    start(wire_receiver(rank), [&](Batch& batch, std::vector<float>& tensor) {
      for (int64_t version = 1; version <= kLast; ++version)
        REQUIRE_HERE(batch.recv({}, kPatience).wait() == version &&
                     holds_quantised(wire_receiver(rank), tensor, version));
      return 0;
    });
  start("evaluation", [&] {
    under_way.wait();
    return with_batch(evaluation(), store_, [&](Batch& batch, std::vector<float>& tensor) {
      for (int others = 1; others < kWireSenders; ++others) joined.raise();
      for (int i = 0; i < 5; ++i) {
        batch.recv({}, kPatience).wait();
        REQUIRE_HERE(!batch.torn() && holds_quantised(evaluation(), tensor, batch.version()));
      }
      return 0;  // while the others go on
    });
  });
  expect_all_well();
}

TEST_F(WireReturn, AJobThatLeavesWhileASendIsUnderWayTakesNothingFromTheOthers) {
  const Signal attached, under_way, left;
  for (Rank rank = 0; rank < kWireSenders; ++rank)
    start(wire_sender(rank), [&](Batch& batch, std::vector<float>& tensor) {
      for (int64_t version = 1; version <= 100; ++version) {
        fill(wire_sender(rank), tensor, version);
        if (version == 5) (rank == 0 ? attached : left).wait();
        Handle handle = batch.send(version, kPatience);
        if (version == 5 && rank == 0) under_way.raise();
        REQUIRE_HERE(handle.wait() == version);
      }
      return 0;
    });
  for (Rank rank = 0; rank < 2; ++rank)
    start(wire_receiver(rank), [&](Batch& batch, std::vector<float>& tensor) {
      for (int64_t version = 1; version <= 100; ++version)
        REQUIRE_HERE(batch.recv({}, kPatience).wait() == version &&
                     holds_quantised(wire_receiver(rank), tensor, version));
      return 0;
    });
  start(evaluation(), [&](Batch& batch, std::vector<float>&) {
    attached.raise();
    under_way.wait();
    batch.close();
    for (int others = 1; others < kWireSenders; ++others) left.raise();
    return 0;
  });
  expect_all_well();
}

// One rank begins a version before another job is there, and the others after: that job gets the next one.
TEST_F(WireReturn, AStagedVersionThatAJobComesTooLateForIsTakenByTheOther) {
  const Signal under_way, taken;
  Barrier over;
  start("trainer/0", [&] {
    log().set_level(LogLevel::info);
    const Side side = quantised(staged(trainer(0)));
    return with_batch(side, store_, [&](Batch& batch, std::vector<float>& tensor) {
      while (batch.stats().sessions < 2) std::this_thread::yield();
      for (int64_t version = 1; version <= 2; ++version) {
        fill(side, tensor, version);
        REQUIRE_HERE(batch.send(version, kPatience).wait() == version);
        for (Rank rank = 0; rank < 2 && version == 1; ++rank) taken.wait();
      }
      over.pass();
      return 0;
    });
  });
  start("trainer/1", [&] {
    const Side side = quantised(staged(trainer(1)));
    return with_batch(side, store_, [&](Batch& batch, std::vector<float>& tensor) {
      for (int64_t version = 1; version <= 2; ++version) {
        fill(side, tensor, version);
        while (version == 2 && batch.stats().sessions < 2) std::this_thread::yield();
        Handle handle = batch.send(version, kPatience);
        if (version == 1) under_way.raise();
        REQUIRE_HERE(handle.wait() == version);
      }
      over.pass();
      return 0;
    });
  });
  for (Rank rank = 0; rank < 2; ++rank)
    start(wire_receiver(rank), [&](Batch& batch, std::vector<float>& tensor) {
      for (int64_t version = 1; version <= 2; ++version) {
        REQUIRE_HERE(batch.recv({}, kPatience).wait() == version &&
                     holds_quantised(wire_receiver(rank), tensor, version));
        if (version == 1) taken.raise();
      }
      over.pass();
      return 0;
    });
  start("evaluation", [&] {
    under_way.wait();
    return with_batch(evaluation(), store_, [&](Batch& batch, std::vector<float>& tensor) {
      REQUIRE_HERE(batch.recv({}, kPatience).wait() == 2 && holds_quantised(evaluation(), tensor, 2));
      over.pass();
      return 0;
    });
  });
  over.open();
  expect_all_well(3 * hang_limit());
  EXPECT_THAT(of("trainer/0").output, AllOf(HasSubstr("job.late"), HasSubstr("with=evaluation"), HasSubstr("version=1"),
                                            HasSubstr("trainer/1 has sent version 1 already")));
}

class WireComeback : public JobsTest, public testing::WithParamInterface<Mode> {};

// In place the send ends with the loss, and is repeated; staged it succeeds, and nobody takes it.
TEST_P(WireComeback, OfAReceivingRankWhileASendIsUnderWay) {
  const auto side_of = [](Side side) {
    side.options.mode = GetParam();
    return side;
  };
  const Signal first, under_way;
  Barrier over;
  for (Rank rank = 0; rank < kWireSenders; ++rank)
    start(side_of(wire_sender(rank)), [&](Batch& batch, std::vector<float>& tensor) {
      fill(wire_sender(rank), tensor, 1);
      REQUIRE_HERE(batch.send(1, kPatience).wait() == 1);
      const auto await_return = [&] {
        while (batch.stats().sessions < 2) std::this_thread::yield();
      };
      if (rank == 0) {
        for (int others = 1; others < kWireSenders; ++others) first.wait();
      } else {
        first.raise();
        await_return();
      }
      fill(wire_sender(rank), tensor, 2);
      Handle handle = batch.send(2, 2 * kPatience);
      if (rank == 0) under_way.raise();
      bool sent = went_well([&] { handle.wait(); });
      REQUIRE_HERE(rank != 0 || sent == (GetParam() == Mode::kStaged));
      while (!sent) sent = went_well([&] { batch.send(2, kAttempt).wait(); });
      await_return();
      fill(wire_sender(rank), tensor, 3);
      REQUIRE_HERE(batch.send(3, kPatience).wait() == 3);
      over.pass();
      return 0;
    });
  const auto receive = [&](Rank rank) {
    return [&, rank](Batch& batch, std::vector<float>& tensor) {
      while (batch.version() < 3) {
        if (!went_well([&] { batch.recv({}, kAttempt).wait(); })) continue;
        REQUIRE_HERE(!batch.torn() && holds_quantised(wire_receiver(rank), tensor, batch.version()));
      }
      over.pass();
      return 0;
    };
  };
  start(side_of(wire_receiver(0)), receive(0));
  const pid_t dies = start(side_of(wire_receiver(1)), [&](Batch& batch, std::vector<float>&) {
    batch.recv({}, kPatience).wait();
    under_way.wait();
    return ::raise(SIGKILL);
  });
  start("inference/1, again", [&] {
    await_end(dies);
    return with_batch(side_of(wire_receiver(1)), store_, receive(1));
  });
  over.open();
  EXPECT_EQ(of(dies).status, -SIGKILL) << of(dies).output;
  expect_all_well(4 * hang_limit());
}

INSTANTIATE_TEST_SUITE_P(, WireComeback, testing::Values(Mode::kInPlace, Mode::kStaged),
                         [](const auto& mode) { return mode.param == Mode::kStaged ? "Staged" : "InPlace"; });

}  // namespace
}  // namespace tessera::test
