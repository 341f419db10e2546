// What ranks report about themselves: counters, and answers to queries of their agents.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>

#include "base/metrics.h"
#include "base/observation.h"
#include "tests/support/fixture.h"

namespace tessera::test {
namespace {

constexpr int64_t kRankBytes = 64 * 48 / 2 * int64_t{sizeof(float)};  // that each of two ranks sends or receives

// Asks until the first wait of the rank's only batch is that one.
bool comes_to_wait(const std::string& store, const std::string& job, Rank rank, const std::string& text) {
  for (const Deadline deadline = Deadline::after(hang_limit()); !deadline.passed();) {
    const Report report = report_of(store, job, rank);
    if (report.batches.size() == 1 && !report.batches.front().waits.empty() &&
        report.batches.front().waits.front().text == text)
      return true;
  }
  return false;
}

using Observe = JobsTest;

TEST_F(Observe, CountersTellWhatARankHasDone) {
  const auto run = [this](const Side& side) {
    Metrics& metrics = Metrics::process();
    const TransferSide at = side.sends ? TransferSide::kSend : TransferSide::kReceive;
    const int status = with_batch(side, store_, [&](Batch& batch, std::vector<float>&) {
      REQUIRE_HERE(metrics.sessions.value() == 1);
      REQUIRE_HERE(metrics.registrations(tessera::Outcome::kDone).value() == 1);
      REQUIRE_HERE(metrics.connections.value() >= 2);
      REQUIRE_HERE(metrics.store_requests.value() > 0);
      for (int i = 0; i < 3; ++i) (side.sends ? batch.send() : batch.recv()).wait();
      REQUIRE_HERE(metrics.transfers(at, tessera::Outcome::kDone).value() == 3);
      REQUIRE_HERE(metrics.bytes(at).value() == 3 * kRankBytes);
      REQUIRE_HERE(metrics.versions_offered.value() == (side.sends ? 3U : 0U));
      REQUIRE_HERE(metrics.versions_committed.value() == (side.sends ? 0U : 3U));
      REQUIRE_HERE(metrics.exposition().find("pair=\"weights\",batch=\"policy\"") != std::string::npos);
      return 0;
    });
    REQUIRE_HERE(metrics.sessions.value() == 0);
    REQUIRE_HERE(metrics.connections.value() == 0);
    REQUIRE_HERE(metrics.waits.value() == 0);
    REQUIRE_HERE(metrics.exposition().find("pair=") == std::string::npos);
    return status;
  };
  for (const Rank rank : {0, 1}) {
    start("trainer", [=] { return run(trainer(rank)); });
    start("inference", [=] {
      Side side = inference(rank);
      side.options.mode = Mode::kStaged;
      return run(side);
    });
  }
  expect_all_well();
}

TEST_F(Observe, ARecvThatFailsIsCountedAsSuch) {
  Barrier over;
  start(trainer(0, 1), [&](Batch&, std::vector<float>&) {
    over.pass();
    return 0;
  });
  start(inference(0, 1), [&](Batch& batch, std::vector<float>&) {
    REQUIRE_HERE(batch.recv(std::nullopt, std::chrono::milliseconds(1)).wait_for(hang_limit()));
    Handle handle = batch.recv();
    REQUIRE_HERE(handle.cancel());
    REQUIRE_HERE(Metrics::process().transfers(TransferSide::kReceive, tessera::Outcome::kFailed).value() == 1);
    REQUIRE_HERE(Metrics::process().transfers(TransferSide::kReceive, tessera::Outcome::kCancelled).value() == 1);
    over.pass();
    return 0;
  });
  over.open();
  expect_all_well();
}

TEST_F(Observe, ABusIsSeenAsTheEnvironmentAsksForAndNoLonger) {
  const TemporaryFolder traces;
  for (const Side& side : {trainer(0, 1), inference(0, 1)})
    start(side.job, [&, side] {
      ::setenv("TESSERA_METRICS", "0", 1);
      ::setenv("TESSERA_TRACE", (traces.path() + "/%p.json").c_str(), 1);
      const int status = with_batch(side, store_, [&](Batch& batch, std::vector<float>&) {
        REQUIRE_HERE(Trace::on());
        REQUIRE_HERE(!Observation::start()->metrics_url().empty());
        (side.sends ? batch.send() : batch.recv()).wait();
        return 0;
      });
      REQUIRE_HERE(!Trace::on());
      std::ifstream file(traces.path() + "/" + std::to_string(::getpid()) + ".json");
      const std::string trace{std::istreambuf_iterator<char>(file), {}};
      REQUIRE_HERE(trace.find(side.sends ? "\"name\":\"send\"" : "\"name\":\"recv\"") != std::string::npos);
      return status;
    });
  expect_all_well();
}

TEST_F(Observe, AnAgentSaysForWhomItsBatchWaits) {
  Barrier over;
  start(trainer(0, 1), [&](Batch& batch, std::vector<float>&) {
    batch.send(7).wait();
    batch.send(9).wait();
    over.pass();
    return 0;
  });
  start(inference(0, 1), [&](Batch& batch, std::vector<float>&) {
    batch.recv().wait();
    REQUIRE_HERE(comes_to_wait(store_, "trainer", 0, "inference/0 to take version 9"));
    const BatchReport sender = report_of(store_, "trainer", 0).batches.front();
    REQUIRE_HERE(sender.sends && sender.operation == "send" && sender.operation_version == 9);
    REQUIRE_HERE(sender.version == 7 && sender.newest == 9 && sender.transfers == 1);
    REQUIRE_HERE(sender.bytes == 2 * kRankBytes && sender.peers.front().attached);
    const BatchReport idle = report_of(store_, "inference", 0).batches.front();
    REQUIRE_HERE(!idle.sends && idle.operation.empty() && idle.version == 7 && idle.bytes == 2 * kRankBytes);
    batch.recv().wait();
    Handle handle = batch.recv(12);
    REQUIRE_HERE(comes_to_wait(store_, "inference", 0, "trainer/0 to offer version 12"));
    REQUIRE_HERE(handle.cancel());
    over.pass();
    return 0;
  });
  over.open();
  expect_all_well();
}

}  // namespace
}  // namespace tessera::test
