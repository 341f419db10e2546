// Shared by the tests of one fault at a time.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/support/fixture.h"

namespace tessera::test {

inline constexpr int64_t kVersion = 7;
inline constexpr Timeout kShort = std::chrono::seconds(2);

// Sends and takes whole versions, staged on both sides, so that a sender's snapshot stays on offer.
class Hazard : public JobsTest {
 protected:
  // Offers kVersion to one receiver after another until `over` is raised.
  void start_trainer(const Signal& over) {
    const Side side = staged(trainer(0, 1));
    start(side, [=, &over](Batch& batch, std::vector<float>& tensor) {
      fill(side, tensor, kVersion);
      batch.send(kVersion).wait();
      over.wait();
      return 0;
    });
  }
  static int take(const std::string& store, Timeout timeout = kPatience, const std::string& agent = "") {
    const Side side = staged(inference(0, 1));
    Bus bus({.job = side.job, .store = store, .agent = agent, .threads = 1, .timeout = timeout});
    Pair pair = bus.pair({.name = "weights", .peer = side.peer, .timeout = timeout});
    std::vector<float> tensor = local_tensor(side);
    const TensorSpec spec = spec_of(side, tensor.data());
    Batch batch = pair.accept("policy", {&spec, 1}, timeout, side.options);
    batch.recv({}, timeout).wait();
    return holds(side, tensor, kVersion) && !batch.torn() ? 0 : 5;
  }
  static void give(const std::string& store, Timeout timeout) {
    const Side side = trainer(0, 1);
    Bus bus({.job = side.job, .store = store, .threads = 1, .timeout = timeout});
    Pair pair = bus.pair({.name = "weights", .peer = side.peer, .timeout = timeout});
    std::vector<float> tensor = local_tensor(side);
    fill(side, tensor, kVersion);
    const TensorSpec spec = spec_of(side, tensor.data());
    pair.offer("policy", {&spec, 1}, timeout).send(kVersion, timeout).wait();
  }
  void take_whole(Timeout timeout, const std::string& agent = "") const {
    if (take(store_, timeout, agent) != 0) throw std::logic_error("another version, or a torn one");
  }
  // Starts a sender after an earlier one has failed a receiver, which then takes this one's version.
  void start_trainer_after(const Signal& failed) {
    failed.wait();
    start(trainer(0, 1), [](Batch& batch, std::vector<float>& tensor) {
      fill(trainer(0, 1), tensor, kVersion);
      batch.send(kVersion, kPatience).wait();
      return 0;
    });
  }
  // One process takes what is on offer before `faulty` runs, and another one afterwards.
  void expect_taken_after(const std::string& faulty, const std::function<int()>& body) {
    const Signal over;
    start_trainer(over);
    const auto run = [this](const std::string& name, const std::function<int()>& what) {
      const Outcome& outcome = of(start(name, what), 3 * hang_limit());
      EXPECT_EQ(outcome.status, 0) << name << ": " << outcome.output;
    };
    run("inference/0 before", [this] { return take(store_); });
    run(faulty, body);
    run("inference/0 afterwards", [this] { return take(store_); });
    over.raise();
    expect_all_well();
  }
};

}  // namespace tessera::test
