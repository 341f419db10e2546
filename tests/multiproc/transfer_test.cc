// The bus as its users see it, between real processes: versions, ties, cancellation, counters.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>

#include "tessera/memory.h"
#include "tests/multiproc/jobs.h"

namespace tessera::test {
namespace {

using testing::HasSubstr;

void expect_all_well(ProcessGroup& group) {
  for (const Outcome& outcome : group.wait(2 * hang_limit()))
    EXPECT_EQ(outcome.status, 0) << outcome.name << ": " << outcome.output;
  EXPECT_THAT(group.left_over(), testing::Each(testing::Not(testing::StartsWith("p-"))));
}

// What a check inside a child reports: its exit status is the line's number.
#define REQUIRE_HERE(condition)                                            \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      return 5;                                                            \
    }                                                                      \
  } while (false)

TEST(Transfer, SteadyStateTouchesNoStoreAndAllocatesAndPlansNothing) {
  ProcessGroup group;
  const std::string store = group.start_store();
  const auto check = [](const Batch& batch, int64_t transfers) {
    const BatchStats stats = batch.stats();
    REQUIRE_HERE(stats.transfers == transfers);
    REQUIRE_HERE(stats.store_requests == 0);
    REQUIRE_HERE(stats.plans == 0);
    REQUIRE_HERE(stats.allocations == 0);
    REQUIRE_HERE(stats.bytes_moved == stats.bytes_lower_bound);
    return 0;
  };
  for (Rank rank = 0; rank < 2; ++rank) {
    group.start("trainer", [=] {
      return with_batch(trainer(rank, 2), store, [&](Batch& batch, std::vector<float>&) {
        for (int i = 0; i < 20; ++i) batch.send().wait();
        return check(batch, 20);
      });
    });
    group.start("inference", [=] {
      return with_batch(inference(rank, 2), store, [&](Batch& batch, std::vector<float>&) {
        for (int64_t i = 1; i <= 20; ++i) REQUIRE_HERE(batch.recv().wait() == i);
        REQUIRE_HERE(batch.version() == 20 && !batch.torn());
        return check(batch, 20);
      });
    });
  }
  expect_all_well(group);
}

TEST(Transfer, AReceiverSeesWhatIsOnOfferAndWaitsForAVersion) {
  ProcessGroup group;
  const std::string store = group.start_store();
  group.start("trainer", [=] {
    return with_batch(trainer(0, 1), store, [](Batch& batch, std::vector<float>& tensor) {
      for (const int64_t version : {3, 8}) {
        std::ranges::fill(tensor, static_cast<float>(version));
        REQUIRE_HERE(batch.send(version).wait() == version);
      }
      return 0;
    });
  });
  group.start("inference", [=] {
    return with_batch(inference(0, 1), store, [](Batch& batch, std::vector<float>& tensor) {
      REQUIRE_HERE(batch.wait_version(1) == 3);
      REQUIRE_HERE(batch.newest() == 3 && batch.version() == 0);
      REQUIRE_HERE(batch.recv(2).wait() == 3 && tensor[0] == 3);
      REQUIRE_HERE(batch.recv(5).wait() == 8 && tensor[0] == 8);
      return 0;
    });
  });
  expect_all_well(group);
}

TEST(Transfer, ADroppedHandleLetsTheOperationGoOnAndACancelledOneIsRepeated) {
  ProcessGroup group;
  const std::string store = group.start_store();
  group.start("trainer", [=] {
    return with_batch(trainer(0, 1), store, [](Batch& batch, std::vector<float>&) {
      Handle first = batch.send(1);
      REQUIRE_HERE(first.cancel());
      try {
        first.wait();
        return 6;
      } catch (const Error& error) {
        REQUIRE_HERE(error.code() == ErrorCode::kCancelled);
      }
      {
        const Handle dropped = batch.send(2);
      }
      while (batch.stats().transfers == 0) ::usleep(1000);
      batch.send(3).wait();
      return 0;
    });
  });
  group.start("inference", [=] {
    return with_batch(inference(0, 1), store, [](Batch& batch, std::vector<float>&) {
      REQUIRE_HERE(batch.recv(2).wait() == 2);
      REQUIRE_HERE(batch.recv().wait() == 3);
      return 0;
    });
  });
  expect_all_well(group);
}

TEST(Transfer, TiedDestinationsAreWrittenOnceAndOverlapsAreRefused) {
  ProcessGroup group;
  const std::string store = group.start_store();
  const auto spec = [](const char* name, float* data) {
    return TensorSpec{.name = name, .data = data, .dtype = DType::kF32, .shape = {8, 4}, .layout = {}};
  };
  group.start("trainer", [=] {
    Bus bus({.job = "trainer", .store = store});
    Pair pair = bus.pair({.name = "weights", .peer = "inference"});
    std::vector<float> weight(32);
    std::iota(weight.begin(), weight.end(), 1.0f);
    const std::vector<TensorSpec> specs{spec("embed", weight.data()), spec("head", weight.data())};
    Batch batch = pair.offer("policy", specs);
    batch.send().wait();
    return 0;
  });
  group.start("inference", [=] {
    Bus bus({.job = "inference", .store = store});
    Pair pair = bus.pair({.name = "weights", .peer = "trainer"});
    std::vector<float> weight(40);
    const std::vector<TensorSpec> tied{spec("embed", weight.data()), spec("head", weight.data())};
    Batch batch = pair.accept("policy", tied);
    batch.recv().wait();
    REQUIRE_HERE(batch.stats().rank_bytes == 128);  // once, not twice
    REQUIRE_HERE(weight[31] == 32.0f && weight[32] == 0.0f);
    return 0;
  });
  expect_all_well(group);
}

TEST(Transfer, PartsOfAFusedWeightAreTensorsOfTheirOwn) {
  ProcessGroup group;
  const std::string store = group.start_store();
  // The trainer holds q and k apart; inference holds [q | k] side by side in one matrix of 4 columns.
  group.start("trainer", [=] {
    Bus bus({.job = "trainer", .store = store});
    Pair pair = bus.pair({.name = "weights", .peer = "inference"});
    std::vector<float> q(6 * 2, 1.0f), k(6 * 2, 2.0f);
    const std::vector<TensorSpec> specs{
        {.name = "q", .data = q.data(), .dtype = DType::kF32, .shape = {6, 2}, .layout = {}},
        {.name = "k", .data = k.data(), .dtype = DType::kF32, .shape = {6, 2}, .layout = {}}};
    Batch batch = pair.offer("policy", specs);
    batch.send().wait();
    return 0;
  });
  group.start("inference", [=] {
    Bus bus({.job = "inference", .store = store});
    Pair pair = bus.pair({.name = "weights", .peer = "trainer"});
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
  expect_all_well(group);
}

TEST(Transfer, AForkedChildIsToldThatTheHandleIsItsParents) {
  ProcessGroup group;
  const std::string store = group.start_store();
  group.start("trainer", [=] {
    return with_batch(trainer(0, 1), store, [](Batch& batch, std::vector<float>&) {
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
  });
  group.start("inference", [=] {
    return with_batch(inference(0, 1), store, [](Batch& batch, std::vector<float>&) {
      batch.recv().wait();
      return 0;
    });
  });
  expect_all_well(group);
}

TEST(Transfer, TheAutoStoreNeedsNoServer) {
  ProcessGroup group;
  for (Rank rank = 0; rank < 2; ++rank) {
    group.start("trainer", [=] {
      return with_batch(trainer(rank, 2), "auto", [](Batch& batch, std::vector<float>&) {
        batch.send().wait();
        return 0;
      });
    });
    group.start("inference", [=] {
      return with_batch(inference(rank, 2), "auto", [](Batch& batch, std::vector<float>&) {
        batch.recv().wait();
        return 0;
      });
    });
  }
  expect_all_well(group);
}

TEST(Transfer, ARankThatClosesItsBatchIsNamed) {
  ProcessGroup group;
  const std::string store = group.start_store();
  group.start("trainer", [=] {
    return with_batch(trainer(0, 1), store, [](Batch& batch, std::vector<float>&) {
      batch.close();
      return 0;
    });
  });
  group.start("inference", [=] {
    return with_batch(inference(0, 1), store, [](Batch& batch, std::vector<float>&) {
      batch.recv().wait();
      return 0;
    });
  });
  const std::vector<Outcome> outcomes = group.wait(hang_limit());
  EXPECT_EQ(outcomes[0].status, 0) << outcomes[0].output;
  EXPECT_EQ(outcomes[1].status, 10 + static_cast<int>(ErrorCode::kPeerLost)) << outcomes[1].output;
  EXPECT_THAT(outcomes[1].output, HasSubstr("trainer/0 has closed the batch"));
}

}  // namespace
}  // namespace tessera::test
