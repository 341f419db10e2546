// Staged on both sides: receivers commit straight out of the sender's snapshot, which they have the lease of. Whatever
// becomes of the sender, a rank holds one whole version, and all ranks hold the same one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <fstream>
#include <ostream>
#include <sstream>
#include <string_view>
#include <thread>

#include "base/clock.h"
#include "base/fail_point.h"
#include "base/process.h"
#include "base/testing.h"
#include "tessera/memory.h"
#include "tests/support/fixture.h"

namespace tessera::test {
namespace {

using testing::AnyOf;

// What a receiver does when it comes to a place for the second time: as it takes version 2.
std::string_view watched_place;
void (*at_watched_place)() = nullptr;
pid_t other = 0;
std::atomic<int> visits{0};

void watch(std::string_view place) {
  if (place == watched_place && ++visits == 2) at_watched_place();
}

void on_second_visit(std::string_view place, void (*action)()) {
  watched_place = place;
  at_watched_place = action;
  fail_point_hook() = watch;
}

void kill_other() {
  ::kill(other, SIGKILL);
  await_end(other);
}

void await_stop(pid_t pid) {
  const Deadline deadline = Deadline::after(hang_limit());
  while (!is_stopped(pid) && !deadline.passed()) std::this_thread::yield();
}

// --- what is taken -------------------------------------------------------------------------------

struct WithDigest : JobsTest, testing::WithParamInterface<bool> {};

TEST_P(WithDigest, WhatIsTakenWhileTrainingGoesOnIsOneVersion) {
  constexpr int64_t kLast = 200;
  Barrier over;
  const auto side_of = [](Side side) {
    side.digest = GetParam();
    return staged(side);
  };
  const Shared<std::atomic<int>> copies;
  static std::atomic<int>* counted = nullptr;
  counted = &*copies;
  for (const Rank rank : {0, 1})
    start(side_of(trainer(rank)), [&, rank](Batch& batch, std::vector<float>& tensor) {
      for (int64_t version = 1; version <= kLast; ++version) {
        fill(trainer(rank), tensor, version);
        batch.send(version, kPatience).wait();
      }
      over.pass();
      return 0;
    });
  for (const Rank rank : {0, 1})
    start(side_of(inference(rank)), [&, rank](Batch& batch, std::vector<float>& tensor) {
      fail_point_hook() = [](std::string_view place) {
        if (place == "staged: copying") ++*counted;
      };
      while (batch.version() < kLast) {
        Handle handle = batch.recv({}, kPatience);
        handle.wait();
        REQUIRE_HERE(!batch.torn() && holds(inference(rank), tensor, batch.version()));
        const Progress progress = handle.progress();
        REQUIRE_HERE(progress.bytes_done == progress.bytes_total && progress.bytes_total > 0);
      }
      REQUIRE_HERE(batch.stats().allocations == 0 && batch.stats().plans == 0);
      over.pass();
      return 0;
    });
  over.open();
  expect_all_well(3 * hang_limit());
  EXPECT_GT(copies->load(), 0) << "none was copied straight out of the snapshots";
}
INSTANTIATE_TEST_SUITE_P(Leases, WithDigest, testing::Bool(),
                         [](const auto& digest) { return digest.param ? "Digest" : "NoDigest"; });

using Leases = JobsTest;

// Flips a bit of the first snapshot in this process that begins with the values of `tensor`.
bool spoil_snapshot_of(std::span<const float> tensor) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("rw-s") == std::string::npos || line.find("memfd:") == std::string::npos) continue;
    unsigned long begin = 0, end = 0;
    char dash = 0;
    std::istringstream(line) >> std::hex >> begin >> dash >> end;
    const std::span<float> memory(reinterpret_cast<float*>(begin), (end - begin) / sizeof(float));
    const auto found = std::ranges::search(memory, tensor.first(64));
    if (found.empty()) continue;
    found.front() = -found.front();
    return true;
  }
  return false;
}

TEST_F(Leases, WhatDoesNotAgreeWithItsDigestLeavesTheTensorsAsTheyAre) {
  const Signal spoilt;
  const Signal over;
  start(staged(trainer(0, 1)), [&](Batch& batch, std::vector<float>& tensor) {
    fill(trainer(0, 1), tensor, 1);
    batch.send(1, kPatience).wait();
    const Deadline deadline = Deadline::after(hang_limit());
    while (batch.digests().empty() && !deadline.passed()) std::this_thread::yield();
    REQUIRE_HERE(spoil_snapshot_of(tensor));
    spoilt.raise();
    over.wait();
    return 0;
  });
  start(staged(inference(0, 1)), [&](Batch& batch, std::vector<float>& tensor) {
    spoilt.wait();
    REQUIRE_HERE(
        fails_with([&] { batch.recv({}, kPatience).wait(); }, ErrorCode::kDataLoss, "digest of tensor weight"));
    REQUIRE_HERE(!batch.torn() && batch.version() == 0);
    REQUIRE_HERE(std::ranges::all_of(tensor, [](float element) { return element == 0; }));
    over.raise();
    return 0;
  });
  expect_all_well(3 * hang_limit());
}

// --- a sender that ends --------------------------------------------------------------------------

// The sender is killed when a receiver is at a step of version 2.
struct Step {
  const char* place;
  Rank rank;
};
void PrintTo(const Step& step, std::ostream* out) {
  *out << step.place << ", rank " << step.rank;
}
class SenderDeath : public JobsTest, public testing::WithParamInterface<Step> {};

TEST_P(SenderDeath, LeavesAllRanksWithOneWholeVersion) {
  const Shared<std::array<std::atomic<int64_t>, 2>> held;
  const Signal go;
  const pid_t sender = start(staged(trainer(0, 1)), [&](Batch& batch, std::vector<float>& tensor) {
    for (int64_t version = 1; version <= 2; ++version) {
      fill(trainer(0, 1), tensor, version);
      if (version == 2)
        for (int i = 0; i < 2; ++i) go.wait();
      batch.send(version, kPatience).wait();
    }
    ::pause();
    return 0;
  });
  Barrier over;
  for (const Rank rank : {0, 1})
    start(staged(inference(rank)), [&, rank, sender](Batch& batch, std::vector<float>& tensor) {
      other = sender;
      if (rank == GetParam().rank) on_second_visit(GetParam().place, kill_other);
      REQUIRE_HERE(batch.recv({}, kPatience).wait() == 1);
      go.raise();
      const bool well = went_well([&] { batch.recv(2, kAttempt).wait(); });
      (*held)[rank] = batch.version();
      REQUIRE_HERE(batch.version() == (well ? 2 : 1));
      REQUIRE_HERE(!batch.torn() && !batch.undecided() && holds(inference(rank), tensor, batch.version()));
      const Deadline deadline = Deadline::after(hang_limit());
      while (batch.version() != 5 && !deadline.passed()) went_well([&] { batch.recv(5, kAttempt).wait(); });
      REQUIRE_HERE(holds(inference(rank), tensor, 5));
      over.pass();
      return 0;
    });
  start("again", [&, this] {
    await_end(sender);
    return with_batch(staged(trainer(0, 1)), store_, [&](Batch& batch, std::vector<float>& tensor) {
      fill(trainer(0, 1), tensor, 5);
      batch.send(5, kPatience).wait();
      over.pass();
      return 0;
    });
  });
  over.open();
  EXPECT_EQ(of(sender).status, -SIGKILL) << "nobody came to " << GetParam().place << ": " << of(sender).output;
  expect_all_well(3 * hang_limit());
  EXPECT_EQ((*held)[0].load(), (*held)[1].load());
  EXPECT_THAT((*held)[0].load(), AnyOf(1, 2));
}
INSTANTIATE_TEST_SUITE_P(AtEachStep, SenderDeath,
                         testing::Values(Step{"staged: pulled", 0}, Step{"staged: pulled", 1}, Step{"staged: voted", 1},
                                         Step{"staged: before the store", 0}, Step{"staged: decided", 0},
                                         Step{"staged: told all", 0}, Step{"staged: copying", 0},
                                         Step{"staged: copying", 1}, Step{"staged: copied", 0}),
                         [](const auto& param) {
                           std::string name = std::string(param.param.place).substr(8);
                           std::erase_if(name, [](char c) { return c == ' '; });
                           return name + std::to_string(param.param.rank);
                         });

// A receiver is stopped before it copies. The sender closes the batch, and gives its memory to others.
TEST_F(Leases, ASenderThatClosesKeepsWhatAStoppedReceiverStillReads) {
  const Signal stopped;
  const Signal closed;
  const Signal over;
  start(staged(trainer(0, 1)), [&](Batch& batch, std::vector<float>& tensor) {
    for (int64_t version = 1; version <= 2; ++version) {
      fill(trainer(0, 1), tensor, version);
      batch.send(version, kPatience).wait();
      if (version == 1) batch.wait_peers(1, 1, kPatience);
    }
    stopped.wait();
    batch.close();
    std::vector<SharedBuffer> others;
    for (int i = 0; i < 64; ++i) {
      others.push_back(SharedHeap::process().allocate(size_t{16} << 10));
      std::memset(others.back().data(), 0xff, others.back().size());
    }
    closed.raise();
    over.wait();
    return 0;
  });
  const pid_t receiver = start(staged(inference(0, 1)), [&](Batch& batch, std::vector<float>& tensor) {
    on_second_visit("staged: copying", [] { ::raise(SIGSTOP); });
    REQUIRE_HERE(batch.recv(1, kPatience).wait() == 1);
    REQUIRE_HERE(batch.recv(2, kPatience).wait() == 2);
    REQUIRE_HERE(!batch.torn() && holds(inference(0, 1), tensor, 2));
    over.raise();
    return 0;
  });
  await_stop(receiver);
  stopped.raise();
  closed.wait();
  group_.kill(receiver, SIGCONT);
  expect_all_well(3 * hang_limit());
}

// One receiver is stopped before it copies and the session ends meanwhile, because the other one is killed. The sender
// goes on with its other snapshot; once both are back it has both again.
TEST_F(Leases, AStoppedReceiverReadsItsVersionWhileTheSenderGoesOn) {
  constexpr int64_t kLast = 12;
  const Signal stopped;
  const Signal sent;
  const Signal back;
  Barrier over;
  Side side = staged(trainer(0, 1));
  start(side, [&](Batch& batch, std::vector<float>& tensor) {
    const auto send = [&](int64_t version) {
      fill(trainer(0, 1), tensor, version);
      batch.send(version, kPatience).wait();
    };
    send(1);
    batch.wait_peers(1, 1, kPatience);
    send(2);
    stopped.wait();
    for (int64_t version = 3; version < kLast; ++version) send(version);
    sent.raise();
    back.wait();
    batch.wait_peers(1, 0, 2 * kPatience);
    send(kLast);
    over.pass();
    return 0;
  });
  const auto to_the_end = [&](const Side& receiver, Batch& batch, std::vector<float>& tensor) {
    const Deadline deadline = Deadline::after(hang_limit());
    while (batch.version() != kLast && !deadline.passed()) {
      went_well([&] { batch.recv({}, kAttempt).wait(); });
      REQUIRE_HERE(!batch.torn() && (batch.version() == 0 || holds(receiver, tensor, batch.version())));
    }
    REQUIRE_HERE(batch.version() == kLast);
    over.pass();
    return 0;
  };
  const pid_t first = start(staged(inference(0)), [&](Batch& batch, std::vector<float>& tensor) {
    on_second_visit("staged: copying", [] { ::raise(SIGSTOP); });
    REQUIRE_HERE(batch.recv(1, kPatience).wait() == 1);
    REQUIRE_HERE(batch.recv(2, kPatience).wait() == 2 && holds(inference(0), tensor, 2));
    back.raise();
    return to_the_end(inference(0), batch, tensor);
  });
  const pid_t second = start(staged(inference(1)), [&](Batch& batch, std::vector<float>&) {
    REQUIRE_HERE(batch.recv(1, kPatience).wait() == 1);
    went_well([&] { batch.recv(2, kAttempt).wait(); });
    ::pause();
    return 0;
  });
  start("inference/1 again", [&, this] {
    await_end(second);
    return with_batch(staged(inference(1)), store_, [&](Batch& batch, std::vector<float>& tensor) {
      return to_the_end(inference(1), batch, tensor);
    });
  });
  over.open();
  await_stop(first);
  group_.kill(second, SIGKILL);
  EXPECT_EQ(of(second).status, -SIGKILL);
  stopped.raise();
  sent.wait();
  group_.kill(first, SIGCONT);
  expect_all_well(3 * hang_limit());
}

// --- what is not committed at once ---------------------------------------------------------------

// What is staged, or undecided, is the receiver's own: the senders may go.
TEST_F(Leases, WhatIsStagedIsCommittedWithoutItsSender) {
  const Signal staged_there;
  const pid_t sender = start(staged(trainer(0, 1)), [&](Batch& batch, std::vector<float>& tensor) {
    fill(trainer(0, 1), tensor, 1);
    batch.send(1, kPatience).wait();
    ::pause();
    return 0;
  });
  start(staged(inference(0, 1)), [&](Batch& batch, std::vector<float>& tensor) {
    REQUIRE_HERE(batch.stage({}, kPatience).wait() == 1);
    staged_there.raise();
    await_end(sender);
    REQUIRE_HERE(batch.commit() == 1 && holds(inference(0, 1), tensor, 1));
    return 0;
  });
  staged_there.wait();
  group_.kill(sender, SIGKILL);
  EXPECT_EQ(of(sender).status, -SIGKILL);
  expect_all_well(3 * hang_limit());
}

TEST_F(Leases, AnUndecidedVersionIsSettledWithoutItsSender) {
  const Signal undecided;
  const Signal go_on;
  const pid_t sender = start(staged(trainer(0, 1)), [&](Batch& batch, std::vector<float>& tensor) {
    for (int64_t version = 1; version <= 2; ++version) {
      fill(trainer(0, 1), tensor, version);
      batch.send(version, kPatience).wait();
      if (version == 1) batch.wait_peers(1, 1, kPatience);
    }
    ::pause();
    return 0;
  });
  const pid_t store = group_.store_pid();
  start(staged(inference(0, 1)), [&](Batch& batch, std::vector<float>& tensor) {
    other = store;
    on_second_visit("staged: before the store", [] { stop_process(other); });
    REQUIRE_HERE(batch.recv(1, kPatience).wait() == 1);
    REQUIRE_HERE(error_of([&] { batch.recv(2, kPatience).wait(); }).find("undecided") != std::string::npos);
    REQUIRE_HERE(batch.undecided() && !batch.torn() && batch.version() == 1 && holds(inference(0, 1), tensor, 1));
    undecided.raise();
    go_on.wait();
    REQUIRE_HERE(batch.commit() == 2 && holds(inference(0, 1), tensor, 2));
    return 0;
  });
  undecided.wait();
  group_.kill(sender, SIGKILL);
  EXPECT_EQ(of(sender).status, -SIGKILL);
  ::kill(store, SIGCONT);
  go_on.raise();
  expect_all_well(3 * hang_limit());
}

}  // namespace
}  // namespace tessera::test
