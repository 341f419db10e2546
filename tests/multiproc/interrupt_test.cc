// Bus::interrupt(), and stops of single calls: each wait ends, with either kind of agent, and the same call then
// succeeds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

#include "base/clock.h"
#include "base/testing.h"
#include "tests/support/fixture.h"

namespace tessera::test {
namespace {

class Interrupt : public JobsTest, public testing::WithParamInterface<const char*> {
 protected:
  BusOptions options(const std::string& job, Rank rank = 0, int world = 1) const {
    return {.job = job, .rank = rank, .world = world, .store = store_, .agent = GetParam(), .threads = 1};
  }
  void start(const BusOptions& rank, const std::function<int(const BusOptions& self)>& body) {
    if (rank.agent == "daemon") start_agent(rank.job, rank.rank);
    JobsTest::start(rank.job + "/" + std::to_string(rank.rank), [rank, body] { return body(rank); });
  }
};

INSTANTIATE_TEST_SUITE_P(With, Interrupt, testing::Values("embedded", "daemon"),
                         [](const auto& agent) { return std::string(agent.param); });

// Asks its agent until the rank waits for that.
bool comes_to_wait(const BusOptions& self, const std::string& what) {
  const auto named = [&](const Wait& wait) { return wait.text.find(what) != std::string::npos; };
  for (const Deadline deadline = Deadline::after(hang_limit()); !deadline.passed();) {
    const Report report = report_of(self.store, self.job, self.rank);
    if (std::ranges::any_of(report.waits, named)) return true;
    for (const BatchReport& batch : report.batches)
      if (std::ranges::any_of(batch.waits, named)) return true;
  }
  return false;
}

// Whether one interrupt ends the call, once the rank waits for that.
bool is_interrupted(Bus& bus, const BusOptions& self, const std::string& what, const std::function<void()>& call) {
  const std::jthread interrupter([&] {
    if (comes_to_wait(self, what)) bus.interrupt();
  });
  try {
    call();
  } catch (const Error& error) {
    return error.code() == ErrorCode::kCancelled &&
           std::string_view(error.what()).find("interrupt") != std::string::npos;
  }
  return false;
}

// The failures of a rank that gave up earlier reach the rank that was waited for, once each.
template <typename Call>
auto in_the_end(const Call& call) {
  for (int heard = 0;; ++heard) {
    try {
      return call();
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kPeerLost || heard == 2) throw;
    }
  }
}

TEST_P(Interrupt, EndsEachWaitAndTheSameCallThenGoesWell) {
  const Signal joins;
  const Signal registers;
  const Signal sends;
  start(options("trainer"), [&](const BusOptions& self) {
    joins.wait();
    Bus bus(self);
    Pair pair = bus.pair({.name = "weights", .peer = "inference"});
    registers.wait();
    float weight = 3;
    const TensorSpec spec{.name = "weight", .data = &weight, .shape = {1}};
    Batch batch = in_the_end([&] { return pair.offer("policy", {&spec, 1}); });
    sends.wait();
    batch.send().wait();
    return 0;
  });
  start(options("inference"), [&](const BusOptions& self) {
    Bus bus(self);
    const PairOptions weights{.name = "weights", .peer = "trainer"};
    REQUIRE_HERE(is_interrupted(bus, self, "to join (pair weights)", [&] { bus.pair(weights); }));
    bus.interrupt();  // nothing waits
    joins.raise();
    Pair pair = bus.pair(weights);
    float weight = 0;
    const TensorSpec spec{.name = "weight", .data = &weight, .shape = {1}};
    const auto accept = [&] { return pair.accept("policy", {&spec, 1}); };
    REQUIRE_HERE(is_interrupted(bus, self, "trainer/0 to register", [&] { pair.manifest("policy"); }));
    for (int time = 0; time < 2; ++time)
      REQUIRE_HERE(is_interrupted(bus, self, "trainer/0 to register", [&] { (void)accept(); }));
    registers.raise();
    Batch batch = in_the_end(accept);
    REQUIRE_HERE(is_interrupted(bus, self, "version 1 to be on offer", [&] { batch.wait_version(1); }));
    sends.raise();
    REQUIRE_HERE(batch.wait_version(1) == 1);
    REQUIRE_HERE(batch.recv().wait() == 1 && weight == 3);
    return 0;
  });
  expect_all_well();
}

// A stop lasts: a call that has not begun to wait ends, too, but none of another batch.
TEST_P(Interrupt, AStopEndsTheCallsThatAreGivenItAndNoOthers) {
  const Signal registers;
  start(options("trainer"), [&](const BusOptions& self) {
    Bus bus(self);
    Pair pair = bus.pair({.name = "weights", .peer = "inference"});
    registers.wait();
    float weight = 3;
    const TensorSpec spec{.name = "weight", .data = &weight, .shape = {1}};
    pair.offer("kept", {&spec, 1}).send().wait();
    in_the_end([&] { return pair.offer("stopped", {&spec, 1}); }).send().wait();
    return 0;
  });
  start(options("inference"), [&](const BusOptions& self) {
    Bus bus(self);
    Pair pair = bus.pair({.name = "weights", .peer = "trainer"});
    float weight = 0;
    const TensorSpec spec{.name = "weight", .data = &weight, .shape = {1}};
    int64_t kept = 0;
    std::jthread other([&] { kept = pair.accept("kept", {&spec, 1}).recv().wait(); });
    REQUIRE_HERE(comes_to_wait(self, "batch kept"));
    std::stop_source stop;
    std::jthread stopper([&] {
      if (comes_to_wait(self, "batch stopped")) stop.request_stop();
    });
    const auto stopped = [&](const std::function<void()>& call) {
      try {
        call();
      } catch (const Error& error) {
        return error.code() == ErrorCode::kCancelled;
      }
      return false;
    };
    const std::stop_token token = stop.get_token();
    REQUIRE_HERE(stopped([&] { pair.manifest("stopped", hang_limit(), token); }));
    REQUIRE_HERE(stopped([&] { pair.manifest("stopped", hang_limit(), token); }));
    REQUIRE_HERE(stopped([&] { (void)pair.accept("stopped", {&spec, 1}, hang_limit(), {.stop = token}); }));
    registers.raise();
    other.join();
    REQUIRE_HERE(kept == 1 && weight == 3);
    REQUIRE_HERE(in_the_end([&] { return pair.accept("stopped", {&spec, 1}); }).recv().wait() == 1);
    return 0;
  });
  expect_all_well();
}

TEST_P(Interrupt, OfARegistrationIsToldToTheOwnRankThatWaitsAndBothRegisterAgain) {
  const Signal speaks;
  const Signal registers;
  start(options("trainer"), [&](const BusOptions& self) {
    Bus bus(self);
    Pair pair = bus.pair({.name = "weights", .peer = "inference"});
    registers.wait();
    float weight = 3;
    const TensorSpec spec{.name = "weight", .data = &weight, .shape = {1}};
    in_the_end([&] { return pair.offer("policy", {&spec, 1}); }).send().wait();
    return 0;
  });
  for (const Rank rank : {0, 1}) {
    start(options("inference", rank, 2), [&, rank](const BusOptions& self) {
      Bus bus(self);
      Pair pair = bus.pair({.name = "weights", .peer = "trainer"});
      const auto say = [&] { return pair.all_gather("policy", std::to_string(rank)); };
      float weight = 0;
      const TensorSpec spec{.name = "weight", .data = &weight, .shape = {1}};
      const auto accept = [&] { return pair.accept("policy", {&spec, 1}); };
      if (rank == 0) {
        REQUIRE_HERE(is_interrupted(bus, self, "inference/1 to register", [&] { say(); }));
        speaks.raise();
      } else {
        speaks.wait();
      }
      REQUIRE_HERE(in_the_end(say) == (std::vector<std::string>{"0", "1"}));
      if (rank == 0) {  // the other rank has registered, once it waits for the trainer
        REQUIRE_HERE(is_interrupted(bus, self, "trainer/0 to register", [&] { (void)accept(); }));
        registers.raise();
      } else {
        const std::string told = error_of([&] { (void)accept(); });
        REQUIRE_HERE(told.find("inference/0 gave up") != std::string::npos);
      }
      REQUIRE_HERE(in_the_end(accept).recv().wait() == 1 && weight == 3);
      return 0;
    });
  }
  expect_all_well();
}

// Also a wait that has not begun: it is to find the batch closed.
TEST_P(Interrupt, ABatchThatIsClosedEndsItsWaits) {
  const Signal attached;
  const auto closed_by = [](Batch& batch, const BusOptions& self, const std::string& what,
                            const std::function<void()>& call) {
    const std::jthread closer([&] {
      if (what.empty() || comes_to_wait(self, what)) batch.close();
    });
    return error_of([&call] { call(); });
  };
  start(options("trainer"), [&](const BusOptions& self) {
    Bus bus(self);
    Pair pair = bus.pair({.name = "weights", .peer = "inference"});
    float weight = 3;
    const TensorSpec spec{.name = "weight", .data = &weight, .shape = {1}};
    Batch batch = pair.offer("policy", {&spec, 1});
    attached.wait();
    const std::string told = closed_by(batch, self, "", [&] { batch.wait_peers(2, 0, hang_limit()); });
    REQUIRE_HERE(told.find("trainer/0 has closed it") != std::string::npos);
    return 0;
  });
  start(options("inference"), [&](const BusOptions& self) {
    Bus bus(self);
    Pair pair = bus.pair({.name = "weights", .peer = "trainer"});
    float weight = 0;
    const TensorSpec spec{.name = "weight", .data = &weight, .shape = {1}};
    Batch batch = pair.accept("policy", {&spec, 1});
    const std::string told =
        closed_by(batch, self, "version 1 to be on offer", [&] { batch.wait_version(1, hang_limit()); });
    attached.raise();
    REQUIRE_HERE(told.find("inference/0 has closed it") != std::string::npos);
    return 0;
  });
  expect_all_well();
}

}  // namespace
}  // namespace tessera::test
