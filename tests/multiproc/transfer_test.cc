// The bus as its users see it, between real processes: versions, ties, cancellation, counters.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "base/testing.h"
#include "tests/support/fixture.h"

namespace tessera::test {
namespace {

using testing::HasSubstr;
using Transfer = JobsTest;

TEST_F(Transfer, SteadyStateTouchesNoStoreAndAllocatesAndPlansNothing) {
  Barrier transferred;  // a batch that a peer has closed registers again
  const auto check = [&](const Batch& batch, int64_t transfers) {
    const BatchStats stats = batch.stats();
    transferred.pass();
    REQUIRE_HERE(stats.transfers == transfers);
    REQUIRE_HERE(stats.store_requests == 0);
    REQUIRE_HERE(stats.plans == 0);
    REQUIRE_HERE(stats.allocations == 0);
    REQUIRE_HERE(stats.bytes_moved == stats.bytes_lower_bound);
    return 0;
  };
  for (Rank rank = 0; rank < 2; ++rank) {
    start(trainer(rank, 2), [&](Batch& batch, std::vector<float>&) {
      for (int i = 0; i < 20; ++i) batch.send().wait();
      return check(batch, 20);
    });
    start(inference(rank, 2), [&](Batch& batch, std::vector<float>&) {
      for (int64_t i = 1; i <= 20; ++i) REQUIRE_HERE(batch.recv().wait() == i);
      REQUIRE_HERE(batch.version() == 20 && !batch.torn());
      return check(batch, 20);
    });
  }
  transferred.open();
  expect_all_well();
}

TEST_F(Transfer, AReceiverSeesWhatIsOnOfferAndWaitsForAVersion) {
  start(trainer(0, 1), [](Batch& batch, std::vector<float>& tensor) {
    for (const int64_t version : {3, 8}) {
      std::ranges::fill(tensor, static_cast<float>(version));
      REQUIRE_HERE(batch.send(version).wait() == version);
    }
    return 0;
  });
  start(inference(0, 1), [](Batch& batch, std::vector<float>& tensor) {
    REQUIRE_HERE(batch.wait_version(1) == 3);
    REQUIRE_HERE(batch.newest() == 3 && batch.version() == 0);
    REQUIRE_HERE(batch.recv(2).wait() == 3 && tensor[0] == 3);
    REQUIRE_HERE(batch.recv(5).wait() == 8 && tensor[0] == 8);
    return 0;
  });
  expect_all_well();
}

// The largest version is as good as any other. A refused call has no effect.
TEST_F(Transfer, VersionsEndWhereTheirNumbersDo) {
  const std::string range = "a version is a whole number from 1 to " + std::to_string(kMaxVersion);
  const auto refused = [=](const std::function<void()>& call) {
    return fails_with(call, ErrorCode::kInvalidArgument, range);
  };
  start(trainer(0, 1), [=](Batch& batch, std::vector<float>& tensor) {
    fill(trainer(0, 1), tensor, 7);
    for (const int64_t version : {kMaxVersion + 1, std::numeric_limits<int64_t>::max()})
      REQUIRE_HERE(refused([&] { batch.send(version); }));
    REQUIRE_HERE(batch.send(kMaxVersion, kPatience).wait() == kMaxVersion);
    REQUIRE_HERE(refused([&] { batch.send(); }));  // the next one
    return 0;
  });
  start(staged(inference(0, 1)), [=](Batch& batch, std::vector<float>& tensor) {
    REQUIRE_HERE(refused([&] { batch.recv(kMaxVersion + 1); }));
    REQUIRE_HERE(refused([&] { batch.stage(kMaxVersion + 1); }));
    REQUIRE_HERE(refused([&] { batch.wait_version(std::numeric_limits<int64_t>::max()); }));
    REQUIRE_HERE(batch.wait_version(kMaxVersion, kPatience) == kMaxVersion);
    REQUIRE_HERE(batch.recv(kMaxVersion, kPatience).wait() == kMaxVersion);
    return holds(inference(0, 1), tensor, 7) ? 0 : 5;
  });
  expect_all_well();
}

TEST_F(Transfer, ADroppedHandleLetsTheOperationGoOnAndACancelledOneIsRepeated) {
  Barrier arrived;
  start(trainer(0, 1), [&](Batch& batch, std::vector<float>& tensor) {
    Handle first = batch.send(1);
    REQUIRE_HERE(a_stop_ends_a_wait_for(first));
    REQUIRE_HERE(first.cancel());
    REQUIRE_HERE(error_of([&] { first.wait(); }).starts_with("cancelled: "));
    std::ranges::fill(tensor, 2.0f);
    {
      const Handle dropped = batch.send(2);
    }
    arrived.pass();
    return 0;
  });
  start(inference(0, 1), [&](Batch& batch, std::vector<float>& tensor) {
    REQUIRE_HERE(batch.recv(2).wait() == 2 && tensor[0] == 2);
    arrived.pass();
    return 0;
  });
  arrived.open();
  expect_all_well();
}

TEST_F(Transfer, AHandleTellsTheBytesOfItsRankBeforeAndAfter) {
  constexpr int64_t kBytes = 64 * 48 * sizeof(float);
  Barrier offered;
  const auto is = [](const Progress& progress, int64_t done) {
    return progress.bytes_done == done && progress.bytes_total == kBytes / 2 && (progress.seconds > 0) == (done > 0);
  };
  for (Rank rank = 0; rank < 2; ++rank) {
    start(trainer(rank), [&](Batch& batch, std::vector<float>&) {
      Handle handle = batch.send();
      REQUIRE_HERE(is(handle.progress(), 0));
      offered.pass();
      handle.wait();
      REQUIRE_HERE(is(handle.progress(), kBytes / 2));
      return 0;
    });
    start(inference(rank), [&](Batch& batch, std::vector<float>&) {
      offered.pass();
      Handle handle = batch.recv();
      handle.wait();
      REQUIRE_HERE(is(handle.progress(), kBytes / 2));
      return 0;
    });
  }
  offered.open();
  expect_all_well();
}

TEST_F(Transfer, EqualNamesInTwoNamespacesDoNotMeet) {
  for (const auto& [name_space, value] : {std::pair{"blue", 1.0f}, std::pair{"green", 2.0f}}) {
    Side sender = trainer(0, 1);
    Side receiver = inference(0, 1);
    sender.name_space = receiver.name_space = name_space;
    start(sender, [&](Batch& batch, std::vector<float>& tensor) {
      std::ranges::fill(tensor, value);
      batch.send().wait();
      return 0;
    });
    start(receiver, [&](Batch& batch, std::vector<float>& tensor) {
      batch.recv().wait();
      REQUIRE_HERE(tensor[0] == value);
      return 0;
    });
  }
  expect_all_well();
}

TEST_F(Transfer, TiedDestinationsAreWrittenOnceAndOverlapsAreRefused) {
  const auto spec = [](const char* name, float* data) {
    return TensorSpec{.name = name, .data = data, .dtype = DType::kF32, .shape = {8, 4}, .layout = {}};
  };
  start(trainer(0, 1), [=](Pair& pair) {
    std::vector<float> weight(32);
    std::iota(weight.begin(), weight.end(), 1.0f);
    const std::vector<TensorSpec> specs{spec("embed", weight.data()), spec("head", weight.data())};
    Batch batch = pair.offer("policy", specs);
    batch.send().wait();
    REQUIRE_HERE(batch.stats().rank_bytes == 128);  // once, not twice
    return 0;
  });
  start(inference(0, 1), [=](Pair& pair) {
    std::vector<float> weight(40);
    const std::vector<TensorSpec> tied{spec("embed", weight.data()), spec("head", weight.data())};
    Batch batch = pair.accept("policy", tied);
    batch.recv().wait();
    REQUIRE_HERE(batch.stats().rank_bytes == 128);
    REQUIRE_HERE(weight[31] == 32.0f && weight[32] == 0.0f);
    return 0;
  });
  expect_all_well();
}

TEST_F(Transfer, PartsOfAFusedWeightAreTensorsOfTheirOwn) {
  // The trainer holds q and k apart; inference holds [q | k] side by side in one matrix of 4 columns.
  start(trainer(0, 1), [=](Pair& pair) {
    std::vector<float> q(6 * 2, 1.0f), k(6 * 2, 2.0f);
    const std::vector<TensorSpec> specs{
        {.name = "q", .data = q.data(), .dtype = DType::kF32, .shape = {6, 2}, .layout = {}},
        {.name = "k", .data = k.data(), .dtype = DType::kF32, .shape = {6, 2}, .layout = {}}};
    Batch batch = pair.offer("policy", specs);
    batch.send().wait();
    return 0;
  });
  start(inference(0, 1), [=](Pair& pair) {
    std::vector<float> fused(6 * 4);
    const std::vector<TensorSpec> specs{
        {.name = "q", .data = fused.data(), .dtype = DType::kF32, .shape = {6, 2}, .layout = {}, .strides = {4, 1}},
        {.name = "k",
         .data = fused.data() + 2,
         .dtype = DType::kF32,
         .shape = {6, 2},
         .layout = {},
         .strides = {4, 1}}};
    Batch batch = pair.accept("policy", specs);
    batch.recv().wait();
    for (size_t i = 0; i < fused.size(); ++i) REQUIRE_HERE(fused[i] == (i % 4 < 2 ? 1.0f : 2.0f));
    return 0;
  });
  expect_all_well();
}

TEST_F(Transfer, AForkedChildIsToldThatTheHandleIsItsParents) {
  start(trainer(0, 1), [](Batch& batch, std::vector<float>&) {
    const pid_t child = ::fork();
    if (child == 0) {
      try {
        batch.send();
      } catch (const Error& error) {
        ::_exit(std::string(error.what()).find("forked child") != std::string::npos ? 0 : 7);
      }
      ::_exit(8);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    REQUIRE_HERE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    batch.send().wait();
    return 0;
  });
  start(inference(0, 1), receive_once);
  expect_all_well();
}

TEST_F(Transfer, TheAutoStoreNeedsNoServer) {
  for (Rank rank = 0; rank < 2; ++rank) {
    start(trainer(rank).who(), [=] { return with_batch(trainer(rank), "auto", send_once); });
    start(inference(rank).who(), [=] { return with_batch(inference(rank), "auto", receive_once); });
  }
  expect_all_well();
}

TEST_F(Transfer, ARankThatClosesItsBatchIsNamed) {
  start(trainer(0, 1), [](Batch& batch, std::vector<float>&) {
    batch.close();
    return 0;
  });
  start(inference(0, 1), receive_once);
  EXPECT_EQ(of("inference/0").status, kPeerLost) << of("inference/0").output;
  EXPECT_THAT(of("inference/0").output, HasSubstr("trainer/0 has closed the batch"));
  expect_all_well();
}

}  // namespace
}  // namespace tessera::test
