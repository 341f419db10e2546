// What ranks report about the tensors that they quantise: BatchStats, also through an agent daemon, and metrics.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <utility>

#include "base/metrics.h"
#include "base/testing.h"
#include "tests/support/fixture.h"

namespace tessera::test {
namespace {

// Rows [64, 48] of f32 at two senders become columns at two receivers: four pieces of [32, 24] in nvfp4. Each has an
// amax and, where sections of 16 bytes begin, scales of the 2 by 2 blocks that it touches and 12 bytes of codes a row.
constexpr int64_t kPieceBytes = 16 + 16 + 32 * 12;
constexpr int64_t kPieceElements = 32 * 24;
constexpr int64_t kPlannedBytes = kPieceElements / 256 * 129;  // 128 of codes, one of scales
constexpr int kTransfers = 3;

Side in_nvfp4(Side side) {
  side.wire = Format::kNvfp4;
  return side;
}

int check_figures(const Side& side, Batch& batch) {
  const BatchStats stats = batch.stats();
  REQUIRE_HERE(stats.quantized_elements == 2 * kPieceElements);
  REQUIRE_HERE(stats.quantized_bytes == 2 * kPieceBytes);
  REQUIRE_HERE(stats.quantized_source_bytes == 2 * kPieceElements * 4);
  REQUIRE_HERE(stats.quantized_elements_moved == 4 * kPieceElements);
  REQUIRE_HERE(stats.quantized_bytes_moved == 4 * kPlannedBytes);
  REQUIRE_HERE(stats.bytes_moved == stats.quantized_bytes_moved);
  REQUIRE_HERE(stats.rank_bytes == stats.quantized_bytes);
  REQUIRE_HERE(stats.amax_exchanges == (side.sends ? kTransfers : 0));
  REQUIRE_HERE(stats.quantized_ratio() == 1.0 * kPieceBytes / (2 * kPieceElements));
  REQUIRE_HERE(stats.batch_ratio() == 1.0 * kPlannedBytes / (2 * kPieceElements));
  return 0;
}

Body transfer_and_check(const Side& side) {
  return [side](Batch& batch, std::vector<float>&) {
    for (int i = 0; i < kTransfers; ++i) (side.sends ? batch.send() : batch.recv()).wait();
    return check_figures(side, batch);
  };
}

using WireFigures = JobsTest;

TEST_F(WireFigures, CountWhatARankQuantisesOrTakes) {
  for (Rank rank = 0; rank < 2; ++rank) {
    for (const Side& side : {in_nvfp4(trainer(rank)), in_nvfp4(inference(rank))}) start(side, transfer_and_check(side));
  }
  expect_all_well();
}

TEST_F(WireFigures, ComeThroughAgents) {
  for (Rank rank = 0; rank < 2; ++rank)
    for (const char* job : {"trainer", "inference"}) start_agent(job, rank);
  Barrier received;  // a staged sender is done before anybody has taken what it sends
  for (Rank rank = 0; rank < 2; ++rank) {
    for (const Side& side : {trainer(rank), inference(rank)})
      start(with_agent(staged(in_nvfp4(side))), [&](Batch& batch, std::vector<float>&) {
        for (int64_t version = 1; side.sends && version <= kTransfers; ++version) batch.send(version).wait();
        if (!side.sends) batch.recv(kTransfers).wait();
        const int wrong = check_figures(side, batch);
        received.pass();
        return wrong;
      });
  }
  received.open();
  expect_all_well(3 * hang_limit());
}

TEST_F(WireFigures, AreNoneWhereNothingIsQuantised) {
  for (const Side& side : {trainer(0), trainer(1), inference(0), inference(1)})
    start(side, [&](Batch& batch, std::vector<float>&) {
      (side.sends ? batch.send() : batch.recv()).wait();
      const BatchStats stats = batch.stats();
      REQUIRE_HERE(stats.quantized_elements == 0 && stats.quantized_bytes == 0 && stats.amax_exchanges == 0);
      REQUIRE_HERE(stats.quantized_elements_moved == 0 && stats.quantized_bytes_moved == 0);
      REQUIRE_HERE(stats.quantized_ratio() == 0 && stats.batch_ratio() == 1);
      return 0;
    });
  expect_all_well();
}

// A refused version is looked at and discussed, but never encoded.
TEST_F(WireFigures, MetricsCountThePhasesThatWentWell) {
  const auto count = [](const char* phase) {
    const std::string series = fmt::format("tessera_quantize_seconds_count{{phase=\"{}\"}} ", phase);
    const std::string text = Metrics::process().exposition();
    const size_t at = text.find(series);
    return at == std::string::npos ? -1 : std::stoi(text.substr(at + series.size()));
  };
  for (Rank rank = 0; rank < 2; ++rank) {
    start(in_nvfp4(trainer(rank)), [&](Batch& batch, std::vector<float>& tensor) {
      const float whole = std::exchange(tensor[5], rank == 1 ? std::numeric_limits<float>::quiet_NaN() : tensor[5]);
      REQUIRE_HERE(!error_of([&] { batch.send(1).wait(); }).empty());
      tensor[5] = whole;
      batch.send(1).wait();
      REQUIRE_HERE(count("amax") == 2 && count("agree") == 1 && count("encode") == 1);
      REQUIRE_HERE(Metrics::process().quantized_bytes.value() == 2 * kPieceBytes);
      REQUIRE_HERE(Metrics::process().quantized_source_bytes.value() == 2 * kPieceElements * 4);
      REQUIRE_HERE(batch.stats().amax_exchanges == 1);
      return 0;
    });
    start(in_nvfp4(inference(rank)), receive_once);
  }
  expect_all_well();
}

}  // namespace
}  // namespace tessera::test
