// Sends of quantised tensors that are cancelled, withdrawn and stopped in each phase: finding amaxes, agreeing on them,
// encoding.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <ostream>
#include <string_view>
#include <thread>

#include "base/fail_point.h"
#include "base/testing.h"
#include "tests/support/fixture.h"
#include "tests/support/wire_jobs.h"

namespace tessera::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// Only set in a child.
const char* awaited_place = nullptr;
const Signal* reached = nullptr;
const Signal* released = nullptr;

// The thread that reaches the place next says so and, if there is anything to wait for, waits.
void tell_there(std::string_view place) {
  if (place != awaited_place) return;
  fail_point_hook() = nullptr;
  reached->raise();
  if (released != nullptr) released->wait();
}

int holds_no_more_than(const Footprint& before) {
  Footprint now = Footprint::now();
  // A thread that was joined stays visible in /proc for a moment.
  for (const Deadline deadline = Deadline::after(hang_limit()); !now.within(before) && !deadline.passed();
       now = Footprint::now())
    std::this_thread::yield();
  if (now.within(before)) return 0;
  std::fprintf(stderr, "before: %s; now: %s\n", before.to_string().c_str(), now.to_string().c_str());
  return 5;
}

// --- phases --------------------------------------------------------------------------------------

struct PhaseEnd {
  const char* place;
  Rank rank;       // that is there when the send is ended
  bool withdraws;  // all ranks do; else that rank cancels

  bool encodes() const { return std::string_view(place) == "wire: encode"; }
  friend void PrintTo(const PhaseEnd& end, std::ostream* out) {
    *out << end.place << (end.withdraws ? ", withdrawn, rank " : ", cancelled, rank ") << end.rank;
  }
};

class WirePhase : public JobsTest, public testing::WithParamInterface<PhaseEnd> {
 protected:
  struct Signals {
    Signal in_phase;
    Signal go_on;
    Signal others[kWireSenders];  // may go on, too
  };

  // Sends a version that fails. Its error is written to standard error.
  int fail_to_send(Batch& batch, Rank rank, int64_t version) const {
    const PhaseEnd& end = GetParam();
    const bool agrees = std::string_view(end.place) == "wire: reported";
    const bool there = rank == end.rank;
    if (there) {
      awaited_place = end.place;
      reached = &signals_.in_phase;
      released = agrees ? nullptr : &signals_.go_on;  // the loop itself must go on
      fail_point_hook() = tell_there;
    } else if (agrees) {
      signals_.others[rank].wait();  // as long as it does not send, the others agree on nothing
    }
    Handle handle = batch.send(version, kPatience);
    if (there) signals_.in_phase.wait();
    const auto let_others_go_on = [&] {
      for (Rank other = 0; other < kWireSenders; ++other)
        if (other != rank) signals_.others[other].raise();
    };
    if (end.withdraws) {
      // Nobody can know before it is offered whether it will be read: this rank is told then.
      bool withdrawn = false;
      {
        const std::jthread withdraws([&] { withdrawn = handle.withdraw(); });
        if (there && !agrees) signals_.go_on.raise();
        if (there && agrees) let_others_go_on();
      }
      REQUIRE_HERE(withdrawn);
    } else if (there || end.encodes()) {
      // The others would offer what all have agreed on, and wait.
      if (there && end.encodes()) let_others_go_on();
      if (!there) signals_.others[rank].wait();
      REQUIRE_HERE(handle.cancel());
      if (there && !agrees) signals_.go_on.raise();
      if (there && agrees) let_others_go_on();
    }
    std::fprintf(stderr, "version %ld: %s\n", static_cast<long>(version), error_of([&] { handle.wait(); }).c_str());
    REQUIRE_HERE(batch.version() == version - 1);
    return 0;
  }

  Signals signals_;
};

// Again and again, with the same batch: the process's resources stay the same.
TEST_P(WirePhase, EndsForAllRanksAlikeAndTheNextVersionIsWhole) {
  constexpr int64_t kLast = 7;  // even ones fail
  const PhaseEnd& end = GetParam();
  Barrier measured;  // whoever leaves changes what the others hold
  for (Rank rank = 0; rank < kWireSenders; ++rank)
    start(wire_sender(rank), [&](Batch& batch, std::vector<float>& tensor) {
      Footprint before;
      for (int64_t version = 1; version <= kLast; ++version) {
        fill(wire_sender(rank), tensor, version);
        if (version % 2 == 0) {
          const int status = fail_to_send(batch, rank, version);
          if (status != 0) return status;
        } else {
          REQUIRE_HERE(batch.send(version, kPatience).wait() == version);
          if (version == 1) before = Footprint::now();
        }
      }
      const int status = holds_no_more_than(before);
      measured.pass();
      return status;
    });
  for (Rank rank = 0; rank < 2; ++rank)
    start(wire_receiver(rank), [&](Batch& batch, std::vector<float>& tensor) {
      for (int64_t version = 1; version <= kLast; version += 2) {
        REQUIRE_HERE(batch.recv(version, 2 * kPatience).wait() == version);
        REQUIRE_HERE(!batch.torn() && holds_quantised(wire_receiver(rank), tensor, version));
      }
      measured.pass();
      return 0;
    });
  measured.open();
  expect_all_well(4 * hang_limit());
  for (const Outcome& outcome : wait()) {
    if (outcome.name.starts_with("inference")) continue;
    const std::string who = "trainer/" + std::to_string(end.rank);
    const bool told = !end.withdraws && !end.encodes() && outcome.name != who;
    for (int64_t version = 2; version < kLast; version += 2) {
      const std::string what = "version " + std::to_string(version);
      EXPECT_THAT(outcome.output, HasSubstr(what + (told ? ": peer-lost: " : ": cancelled: "))) << outcome.name;
    }
    if (told) {
      EXPECT_THAT(outcome.output, HasSubstr(who + ": the send was cancelled"));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, WirePhase, testing::ValuesIn([] {
                           std::vector<PhaseEnd> ends;
                           for (const char* place : {"wire: look", "wire: reported", "wire: encode"})
                             for (const Rank rank : {0, 2})
                               for (const bool withdraws : {false, true}) ends.push_back({place, rank, withdraws});
                           return ends;
                         }()),
                         [](const auto& end) {
                           return std::string(end.param.place + sizeof("wire:")) + std::to_string(end.param.rank) +
                                  (end.param.withdraws ? "Withdrawn" : "Cancelled");
                         });

using WirePhases = JobsTest;

// A version that begins to be copied is sent, unless it is withdrawn.
TEST_F(WirePhases, AStagedSendIsWithdrawnButNotCancelled) {
  const Signal in_phase, go_on, over;
  const Side sender = quantised(staged(trainer(0, 1)));
  start(sender, [&](Batch& batch, std::vector<float>& tensor) {
    fill(sender, tensor, 1);
    awaited_place = "wire: encode";
    reached = &in_phase;
    released = &go_on;
    fail_point_hook() = tell_there;
    Handle handle = batch.send(1, kPatience);
    in_phase.wait();
    REQUIRE_HERE(!handle.cancel());
    bool withdrawn = false;
    {
      const std::jthread withdraws([&] { withdrawn = handle.withdraw(); });
      go_on.raise();
    }
    REQUIRE_HERE(withdrawn && handle.wait() == 1);
    fill(sender, tensor, 2);
    REQUIRE_HERE(batch.send(2, kPatience).wait() == 2);
    over.wait();
    return 0;
  });
  const Side receiver = quantised(inference(0, 1));
  start(receiver, [&](Batch& batch, std::vector<float>& tensor) {
    REQUIRE_HERE(batch.recv(2, kPatience).wait() == 2 && holds_quantised(receiver, tensor, 2));
    over.raise();
    return 0;
  });
  expect_all_well();
}

// --- ranks that are stopped or late --------------------------------------------------------------

struct WireStop {
  const char* place;
  Rank rank;

  friend void PrintTo(const WireStop& stop, std::ostream* out) { *out << stop.place << " of rank " << stop.rank; }
};

void stop_there(std::string_view place) {
  if (place != awaited_place) return;
  fail_point_hook() = nullptr;
  ::raise(SIGSTOP);
}

class WireStops : public JobsTest, public testing::WithParamInterface<WireStop> {};

// In a loop, like a program that continues sending after a loss.
TEST_P(WireStops, AreNamedByTheOthersAndOverWhenTheRankGoesOn) {
  const WireStop stop = GetParam();
  const Signal given_up;
  pid_t stopped = 0;
  for (Rank rank = 0; rank < kWireSenders; ++rank) {
    const pid_t pid = start(wire_sender(rank), [&](Batch& batch, std::vector<float>& tensor) {
      fill(wire_sender(rank), tensor, 7);
      if (rank == stop.rank) {
        awaited_place = stop.place;
        fail_point_hook() = stop_there;
      }
      const auto send = [&] { return error_of([&] { batch.send(7, kPatience).wait(); }); };
      std::string error = send();
      REQUIRE_HERE(error.starts_with("peer-lost: "));
      std::fprintf(stderr, "%s\n", error.c_str());
      given_up.raise();
      while (error != "(no error)") {
        error = send();
        REQUIRE_HERE(error == "(no error)" || error.starts_with("peer-lost: ") || error.starts_with("deadline"));
      }
      return 0;
    });
    if (rank == stop.rank) stopped = pid;
  }
  for (Rank rank = 0; rank < 2; ++rank)
    start(wire_receiver(rank), [&](Batch& batch, std::vector<float>& tensor) {
      while (!went_well([&] { batch.recv({}, kAttempt).wait(); })) {
      }
      REQUIRE_HERE(batch.version() == 7 && !batch.torn() && holds_quantised(wire_receiver(rank), tensor, 7));
      return 0;
    });
  for (int others = 1; others < kWireSenders; ++others) given_up.wait();
  ::kill(stopped, SIGCONT);
  const std::string name = "trainer/" + std::to_string(stop.rank);
  expect_all_well(4 * hang_limit());
  for (const Outcome& outcome : wait()) {
    if (outcome.name.starts_with("inference") || outcome.name == name) continue;
    EXPECT_THAT(outcome.output, HasSubstr(name + " (pid " + std::to_string(stopped) + ") is stopped"));
  }
}

INSTANTIATE_TEST_SUITE_P(Places, WireStops,
                         testing::Values(WireStop{"wire: look", 0}, WireStop{"wire: look", 2},
                                         WireStop{"wire: reported", 0}, WireStop{"wire: reported", 2},
                                         WireStop{"wire: agreed", 0}, WireStop{"wire: agreed", 2}),
                         [](const auto& stop) {
                           return std::string(stop.param.place + sizeof("wire:")) + std::to_string(stop.param.rank);
                         });

TEST_F(WirePhases, ARankThatDoesNotSendIsNamedAtTheDeadline) {
  const Signal given_up;
  for (Rank rank = 0; rank < kWireSenders; ++rank)
    start(wire_sender(rank), [&](Batch& batch, std::vector<float>& tensor) {
      fill(wire_sender(rank), tensor, 2);
      if (rank == 1)
        for (int others = 1; others < kWireSenders; ++others) given_up.wait();
      const Timeout patience = rank == 0 ? std::chrono::milliseconds(500) : kPatience;
      std::fprintf(stderr, "%s\n", error_of([&] { batch.send(1, patience).wait(); }).c_str());
      given_up.raise();
      REQUIRE_HERE(batch.send(2, kPatience).wait() == 2);
      return 0;
    });
  for (Rank rank = 0; rank < 2; ++rank)
    start(wire_receiver(rank), [&](Batch& batch, std::vector<float>& tensor) {
      REQUIRE_HERE(batch.recv({}, 2 * kPatience).wait() == 2 && holds_quantised(wire_receiver(rank), tensor, 2));
      return 0;
    });
  expect_all_well(4 * hang_limit());
  for (const Outcome& outcome : wait()) {
    if (outcome.name.starts_with("inference")) continue;
    EXPECT_THAT(outcome.output, AllOf(HasSubstr("deadline-exceeded: "),
                                      HasSubstr("trainer/1 have not sent the amaxes of quantised tensors")))
        << outcome.name;
  }
}

}  // namespace
}  // namespace tessera::test
