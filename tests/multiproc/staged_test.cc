// Staged versions: a copy is sent, and either all ranks of the receiving job take it or none.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <new>
#include <ostream>
#include <string_view>
#include <thread>

#include "base/clock.h"
#include "base/fail_point.h"
#include "base/metrics.h"
#include "base/testing.h"
#include "tests/support/fixture.h"

namespace tessera::test {
namespace {

using testing::AnyOf;
using testing::HasSubstr;

using Staged = JobsTest;

pid_t stopped_store = 0;
int visits_to_the_store = 0;

// --- sent ----------------------------------------------------------------------------------------

TEST_F(Staged, ASendIsDoneThoughNobodyTakesItAndTheMemoryIsTheUsersAgain) {
  constexpr int64_t kLast = 50;
  const Signal sent[2];
  Barrier over;
  for (const Rank rank : {0, 1})
    start(staged(trainer(rank)), [&, rank](Batch& batch, std::vector<float>& tensor) {
      for (int64_t version = 1; version <= kLast; ++version) {
        fill(trainer(rank), tensor, version);
        REQUIRE_HERE(batch.send(version, kPatience).wait() == version);
        std::ranges::fill(tensor, -1.0F);  // training goes on
      }
      for (int i = 0; i < 2; ++i) sent[rank].raise();
      over.pass();
      return 0;
    });
  for (const Rank rank : {0, 1})
    start(inference(rank), [&, rank](Batch& batch, std::vector<float>& tensor) {
      for (const Signal& all : sent) all.wait();
      batch.recv({}, kPatience).wait();
      REQUIRE_HERE(batch.version() == kLast && holds(inference(rank), tensor, kLast));
      over.pass();
      return 0;
    });
  over.open();
  expect_all_well(3 * hang_limit());
}

// Every version that is taken while newer ones are copied over older ones is whole.
TEST_F(Staged, WhatIsTakenWhileTrainingGoesOnIsOneVersion) {
  constexpr int64_t kLast = 300;
  Barrier over;
  for (const Rank rank : {0, 1})
    start(staged(trainer(rank)), [&, rank](Batch& batch, std::vector<float>& tensor) {
      for (int64_t version = 1; version <= kLast; ++version) {
        fill(trainer(rank), tensor, version);
        batch.send(version, kPatience).wait();
      }
      over.pass();
      return 0;
    });
  for (const Rank rank : {0, 1})
    start(inference(rank), [&, rank](Batch& batch, std::vector<float>& tensor) {
      while (batch.version() < kLast) {
        batch.recv({}, kPatience).wait();
        REQUIRE_HERE(holds(inference(rank), tensor, batch.version()));
      }
      over.pass();
      return 0;
    });
  over.open();
  expect_all_well(3 * hang_limit());
}

TEST_F(Staged, PartialTermsAreReducedIntoTheCopy) {
  constexpr int64_t kLast = 20;
  Barrier over;
  for (const Rank rank : {0, 1}) {
    Side side = staged(trainer(rank));
    side.layout = "2:Psum";
    start(side, [&, side](Batch& batch, std::vector<float>& tensor) {
      for (int64_t version = 1; version <= kLast; ++version) {
        fill(side, tensor, version);
        batch.send(version, kPatience).wait();
        std::ranges::fill(tensor, -1.0F);
      }
      over.pass();
      return 0;
    });
  }
  for (const Rank rank : {0, 1})
    start(inference(rank), [&, rank](Batch& batch, std::vector<float>& tensor) {
      while (batch.version() < kLast) {
        batch.recv({}, kPatience).wait();
        std::vector<float> half = tensor;
        for (float& element : half) element /= 2;  // two ranks, equal terms
        REQUIRE_HERE(holds(inference(rank), half, batch.version()));
      }
      over.pass();
      return 0;
    });
  over.open();
  expect_all_well(3 * hang_limit());
}

TEST_F(Staged, AVersionIsWithdrawnUnlessARankHasBegunToTakeIt) {
  const Signal withdrawn;
  const Signal taken;
  const Signal checked;
  start(staged(trainer(0, 1)), [&](Batch& batch, std::vector<float>& tensor) {
    const Side side = trainer(0, 1);
    fill(side, tensor, 1);
    Handle first = batch.send(1, kPatience);
    first.wait();
    REQUIRE_HERE(first.withdraw() && !first.withdraw());
    withdrawn.raise();
    fill(side, tensor, 2);
    Handle second = batch.send(2, kPatience);
    second.wait();
    taken.wait();
    REQUIRE_HERE(!second.withdraw());
    checked.raise();
    return 0;
  });
  start(inference(0, 1), [&](Batch& batch, std::vector<float>& tensor) {
    withdrawn.wait();
    REQUIRE_HERE(batch.recv({}, kPatience).wait() == 2 && holds(inference(0, 1), tensor, 2));
    taken.raise();
    checked.wait();
    return 0;
  });
  expect_all_well(3 * hang_limit());
}

TEST_F(Staged, AVersionThatAJobHasTakenIsNotWithdrawnOnceItHasLeft) {
  const Signal left;
  const Signal checked;
  start(staged(trainer(0, 1)), [&](Batch& batch, std::vector<float>& tensor) {
    fill(trainer(0, 1), tensor, 1);
    Handle handle = batch.send(1, kPatience);
    handle.wait();
    left.wait();
    while (Metrics::process().sessions.value() != 0) std::this_thread::yield();
    REQUIRE_HERE(!handle.withdraw());
    checked.raise();
    return 0;
  });
  start(inference(0, 1), [&](Batch& batch, std::vector<float>&) {
    REQUIRE_HERE(batch.recv({}, kPatience).wait() == 1);
    batch.close();
    left.raise();
    checked.wait();
    return 0;
  });
  expect_all_well(3 * hang_limit());
}

// What one rank has sent, the other ranks of its job still have to send, even if a job has registered in between.
TEST_F(Staged, ARankSendsWhatAnOwnRankHasSentWhenAJobComes) {
  const Signal sent;
  const Signal taken[2];  // told each sender by each receiver
  start(staged(trainer(0)), [&](Batch& batch, std::vector<float>& tensor) {
    fill(trainer(0), tensor, 1);
    while (Metrics::process().sessions.value() != 2) std::this_thread::yield();
    REQUIRE_HERE(batch.send({}, kPatience).wait() == 1);
    for (int i = 0; i < 3; ++i) taken[0].wait();
    return 0;
  });
  start(staged(trainer(1)), [&](Batch& batch, std::vector<float>& tensor) {
    fill(trainer(1), tensor, 1);
    REQUIRE_HERE(batch.send({}, kPatience).wait() == 1);
    sent.raise();
    for (int i = 0; i < 3; ++i) taken[1].wait();
    return 0;
  });
  const auto receive = [&](const Side& side) {
    return [&, side](Batch& batch, std::vector<float>& tensor) {
      REQUIRE_HERE(batch.recv({}, kPatience).wait() == 1 && holds(side, tensor, 1));
      for (const Signal& sender : taken) sender.raise();
      return 0;
    };
  };
  for (const Rank rank : {0, 1}) start(inference(rank), receive(inference(rank)));
  const Side other{.job = "evaluation", .peer = "trainer", .rank = 0, .world = 1, .layout = "1:R"};
  sent.wait();
  start(other, receive(other));
  expect_all_well(3 * hang_limit());
}

// In place; the terms of Partial tensors are reduced before the version is offered.
class Withdrawn : public JobsTest, public testing::WithParamInterface<const char*> {};

TEST_P(Withdrawn, OnAllRanksOrOnNone) {
  struct Count {
    std::atomic<int> withdrawn[2];
  };
  const Shared<Count> count;
  const float terms = std::string_view(GetParam()) == "2:Psum" ? 2 : 1;  // equal ones
  for (const Rank rank : {0, 1}) {
    Side side = trainer(rank);
    side.layout = GetParam();
    start(side, [&, side](Batch& batch, std::vector<float>& tensor) {
      for (int64_t version = 1; version <= 60; ++version) {
        fill(side, tensor, version);
        Handle handle = batch.send(version, kPatience);
        if (handle.withdraw()) count->withdrawn[side.rank].fetch_add(1);
        handle.wait_for(kPatience);
      }
      batch.send(100, kPatience).wait();
      return 0;
    });
  }
  for (const Rank rank : {0, 1})
    start(inference(rank), [=](Batch& batch, std::vector<float>& tensor) {
      while (batch.version() < 100) {
        batch.recv({}, kPatience).wait();
        std::vector<float> term = tensor;
        for (float& element : term) element /= terms;
        REQUIRE_HERE(holds(inference(rank), term, batch.version()) || batch.version() == 100);
      }
      return 0;
    });
  expect_all_well(3 * hang_limit());
  EXPECT_EQ(count->withdrawn[0].load(), count->withdrawn[1].load());
}
INSTANTIATE_TEST_SUITE_P(Staged, Withdrawn, testing::Values("2:S0", "2:Psum"), [](const auto& layout) {
  return std::string_view(layout.param) == "2:S0" ? "Shards" : "PartialTerms";
});

// --- received ------------------------------------------------------------------------------------

TEST_F(Staged, MemoryIsAsBeforeUntilTheVersionIsCommitted) {
  const Signal checked;
  start(trainer(0, 1), [&](Batch& batch, std::vector<float>& tensor) {
    for (int64_t version = 1; version <= 3; ++version) {
      fill(trainer(0, 1), tensor, version);
      batch.send(version, kPatience).wait();
    }
    checked.wait();
    return 0;
  });
  start(staged(inference(0, 1)), [&](Batch& batch, std::vector<float>& tensor) {
    const Side side = inference(0, 1);
    REQUIRE_HERE(batch.recv({}, kPatience).wait() == 1 && holds(side, tensor, 1));
    REQUIRE_HERE(batch.stage({}, kPatience).wait() == 2);
    REQUIRE_HERE(holds(side, tensor, 1) && batch.version() == 1 && !batch.torn());
    REQUIRE_HERE(error_of([&] { (void)batch.stage({}, kPatience); }).find("commit() it first") != std::string::npos);
    REQUIRE_HERE(batch.commit() == 2 && holds(side, tensor, 2) && batch.version() == 2);
    REQUIRE_HERE(batch.recv({}, kPatience).wait() == 3 && holds(side, tensor, 3));
    checked.raise();
    return 0;
  });
  expect_all_well(3 * hang_limit());
}

// The store is stopped when rank 0 records the decision: rank 0 does not know it, keeps what it holds, and says so.
// Once the store continues, all ranks settle alike.
TEST_F(Staged, WithoutTheStoreAVersionIsUndecidedUntilItAnswers) {
  Barrier settled;
  Barrier over;
  stopped_store = group_.store_pid();
  auto* held = static_cast<std::atomic<int64_t>*>(
      ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  start(trainer(0, 1), [&](Batch& batch, std::vector<float>& tensor) {
    for (int64_t version = 1; version <= 2; ++version) {
      fill(trainer(0, 1), tensor, version);
      batch.send(version, kPatience).wait();
    }
    settled.pass();
    fill(trainer(0, 1), tensor, 3);
    batch.send(3, kPatience).wait();
    over.pass();
    return 0;
  });
  for (const Rank rank : {0, 1}) {
    const Side side = staged(inference(rank));
    start(side.who(), [&, side, rank, held] {
      if (rank == 0)
        fail_point_hook() = [](std::string_view place) {
          if (place == "staged: before the store" && ++visits_to_the_store == 2) stop_process(stopped_store);
        };
      return with_batch(side, store_, [&](Batch& batch, std::vector<float>& tensor) {
        REQUIRE_HERE(batch.recv({}, kPatience).wait() == 1);
        if (rank == 0) {
          REQUIRE_HERE(error_of([&] { batch.recv({}, kPatience).wait(); }).find("undecided") != std::string::npos);
          REQUIRE_HERE(batch.undecided() && batch.version() == 1 && holds(side, tensor, 1));
          ::kill(stopped_store, SIGCONT);
        }
        int64_t version = batch.recv({}, kPatience).wait();  // at rank 0 what it had staged
        held[rank] = version;
        settled.pass();
        REQUIRE_HERE(!batch.undecided() && holds(side, tensor, version));
        while (version != 3) version = batch.recv({}, kPatience).wait();
        REQUIRE_HERE(holds(side, tensor, 3));
        over.pass();
        return 0;
      });
    });
  }
  settled.open();
  over.open();
  expect_all_well(3 * hang_limit());
  EXPECT_EQ(held[0], held[1]);
  EXPECT_EQ(held[0], 2);
  ::munmap(held, 4096);
}

// One receiving rank dies at a step of version 2. The others hold version 1 or version 2, all the same, and whole; once
// it has been started again, all go on.
struct Death {
  const char* place;
  Rank rank;
};
void PrintTo(const Death& death, std::ostream* out) {
  *out << death.place << ", rank " << death.rank;
}
class StagedDeath : public JobsTest, public testing::WithParamInterface<Death> {};

// Shared between the processes.
struct SeenByRanks {
  std::atomic<bool> dead = false;                        // the rank that dies
  std::atomic<bool> again = false;                       // it is being started again
  std::array<std::atomic<int64_t>, 3> held{-1, -1, -1};  // version of the others in between
  std::atomic<int> done = 0;
};

std::string place_to_die_at;
int visits_to_live_through = 0;

void die_there(std::string_view place) {
  if (place == place_to_die_at && visits_to_live_through-- == 0) ::kill(::getpid(), SIGKILL);
}

TEST_P(StagedDeath, LeavesTheOthersWithOneVersion) {
  constexpr int kRanks = 3;
  auto* seen =
      new (::mmap(nullptr, sizeof(SeenByRanks), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) SeenByRanks;
  const Rank dies = GetParam().rank;
  start(trainer(0, 1), [=](Batch& batch, std::vector<float>& tensor) {
    for (int64_t version = 1; version < 1000; ++version) {
      fill(trainer(0, 1), tensor, version);
      (void)went_well([&] { batch.send(version, kAttempt).wait(); });
      if (seen->done == kRanks) return 0;
    }
    return 6;
  });
  // Until it has taken a version together with the rank that was started again.
  const auto receive = [=](Rank rank) {
    const Side side = staged(inference(rank, kRanks));
    return [=](Batch& batch, std::vector<float>& tensor) {
      for (int call = 1; call < 1000; ++call) {
        const bool well = went_well([&] { batch.recv({}, kAttempt).wait(); });
        REQUIRE_HERE(!batch.torn() && (batch.version() == 0 || holds(side, tensor, batch.version())));
        if (seen->again && well && (rank == dies || batch.version() > seen->held[rank])) {
          ++seen->done;
          return 0;
        }
        if (seen->dead && seen->held[rank] < 0) seen->held[rank] = batch.version();
      }
      return 6;
    };
  };
  pid_t dying = 0;
  for (Rank rank = 0; rank < kRanks; ++rank) {
    const Side side = staged(inference(rank, kRanks));
    const pid_t pid = start(side.who(), [=, this] {
      if (rank == dies) {
        place_to_die_at = GetParam().place;
        visits_to_live_through = std::string_view(GetParam().place) == "staged: told one" ? kRanks - 1 : 1;
        fail_point_hook() = die_there;
      }
      return with_batch(side, store_, receive(rank));
    });
    if (rank == dies) dying = pid;
  }
  const Side side = staged(inference(dies, kRanks));
  start("again", [=, this] {
    await_end(dying);
    seen->dead = true;
    for (Rank rank = 0; rank < kRanks; ++rank)
      while (rank != dies && seen->held[rank] < 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    seen->again = true;
    return with_batch(side, store_, receive(dies));
  });
  EXPECT_EQ(of(dying).status, -SIGKILL) << "it did not come to " << GetParam().place << ": " << of(dying).output;
  expect_all_well(3 * hang_limit());
  std::vector<int64_t> versions;
  for (Rank rank = 0; rank < kRanks; ++rank)
    if (rank != dies) versions.push_back(seen->held[rank]);
  EXPECT_EQ(versions[0], versions[1]);
  EXPECT_THAT(versions[0], AnyOf(1, 2));
  ::munmap(seen, sizeof(SeenByRanks));
}

INSTANTIATE_TEST_SUITE_P(AtEachStep, StagedDeath,
                         testing::Values(Death{"staged: pulled", 0}, Death{"staged: pulled", 1},
                                         Death{"staged: voted", 1}, Death{"staged: before the store", 0},
                                         Death{"staged: decided", 0}, Death{"staged: decided", 2},
                                         Death{"staged: told one", 0}, Death{"staged: told all", 0},
                                         Death{"staged: told all", 1}, Death{"staged: copied", 0},
                                         Death{"staged: copied", 2}),
                         [](const auto& param) {
                           std::string name = std::string(param.param.place).substr(8);
                           std::erase_if(name, [](char c) { return c == ' '; });
                           return name + std::to_string(param.param.rank);
                         });

}  // namespace
}  // namespace tessera::test
