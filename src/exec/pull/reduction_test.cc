#include "exec/pull/reduction.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <limits>
#include <memory>

#include "codec/simd/reduce.h"
#include "exec/testing.h"
#include "transport/shm/bounce_ring.h"
#include "transport/transport.h"

namespace tessera {
namespace {

using exec_testing::Completion;
using exec_testing::reach_self;

constexpr Index kRows = 40;
constexpr Index kColumns = 30;

// Peers that each hold a whole f32 matrix; the owner reduces columns [10, 25).
struct Terms {
  const Region region{{IntervalSet({0, kRows}), IntervalSet({10, 25})}};
  std::vector<std::vector<float>> peers;
  std::vector<float> accumulator = std::vector<float>(static_cast<size_t>(region.size()), -1.0f);
  std::vector<float> result = std::vector<float>(static_cast<size_t>(region.size()), -1.0f);

  explicit Terms(size_t count) {
    for (size_t p = 0; p < count; ++p) {
      peers.emplace_back(kRows * kColumns);
      for (size_t i = 0; i < peers[p].size(); ++i)
        peers[p][i] = std::ldexp(1.0f + static_cast<float>(i), static_cast<int>(p * 7) - 7);
    }
  }
  RouteRegion what() const { return {.shape = {kRows, kColumns}, .dtype = DType::kF32, .region = region}; }
  LocalArray array() const { return {Region::full(Shape{kRows, kColumns}), {kColumns * 4, 4}}; }
  PullRoute route(size_t peer, ReduceOp op) {
    return {.what = what(),
            .src = array(),
            .memory = own_range(peers[peer].data(), peers[peer].size() * 4),
            .dst = {region, byte_strides(DType::kF32, region.extents())},
            .dst_dtype = accumulator_of(DType::kF32),
            .data = reinterpret_cast<std::byte*>(accumulator.data()),
            .combine = peer == 0 ? Combine::kFirst : Combine::kAccumulate,
            .op = op};
  }
  ReductionTarget target(ReduceOp op) {
    return {.op = op,
            .dtype = DType::kF32,
            .elements = region.size(),
            .peers = static_cast<int>(peers.size()),
            .accumulator = reinterpret_cast<std::byte*>(accumulator.data()),
            .result = reinterpret_cast<std::byte*>(result.data())};
  }
  // Ascending rank order, one addition after the other.
  std::vector<float> expected(ReduceOp op) const {
    std::vector<float> sums;
    for (Index r = 0; r < kRows; ++r) {
      for (Index c = 10; c < 25; ++c) {
        const auto at = static_cast<size_t>(r * kColumns + c);
        float value = peers[0][at];
        for (size_t p = 1; p < peers.size(); ++p)
          value = op == ReduceOp::kMax ? std::fmax(value, peers[p][at]) : value + peers[p][at];
        sums.push_back(op == ReduceOp::kAvg ? value / static_cast<float>(peers.size()) : value);
      }
    }
    return sums;
  }
};

TEST(ReduceRun, ReducesInRankOrderAndAgainForTheNextTransfer) {
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax}) {
    Terms terms(3);
    WorkerPool pool(2, "pull");
    std::vector<ReduceRun::Step> steps;
    for (size_t p = 0; p < terms.peers.size(); ++p) {
      const PullRoute route = terms.route(p, op);
      const auto peer = reach_self(p == 0 ? "loopback" : "shm");
      steps.push_back({.program = std::make_shared<PullProgram>(
                           peer, std::span(&route, 1), PullOptions{.digest = false, .private_access = Access::kGet}),
                       .stream = {},
                       .on_start = {}});
    }
    Completion done;
    ReduceRun run(std::move(steps), {terms.target(op)}, pool, done.callback());
    for (uint32_t epoch = 1; epoch <= 2; ++epoch) {
      for (float& value : terms.peers[1]) value += static_cast<float>(epoch);
      run.start(epoch);
      ASSERT_TRUE(done.wait());
      EXPECT_EQ(run.status(), Status());
      EXPECT_EQ(terms.result, terms.expected(op)) << to_string(op);
      EXPECT_EQ(run.bytes_done(), run.bytes());
    }
  }
}

// Each rank is owner and peer at once, as in a Partial source: with one worker a pool and rings in both directions.
TEST(ReduceRun, TwoRanksReduceFromOneAnotherThroughRings) {
  Terms ranks[2] = {Terms(2), Terms(2)};
  struct Side {
    WorkerPool pulls{1, "pull"};
    WorkerPool sources{1, "source"};
    Completion filled;
    std::unique_ptr<SourceRun> source;
    std::unique_ptr<ReduceRun> reduce;
  } sides[2];
  Completion done;
  for (size_t s = 0; s < 2; ++s) {  // side s pulls its own term and the other's
    Terms& terms = ranks[s];
    std::vector<ReduceRun::Step> steps(2);
    for (size_t p = 0; p < 2; ++p) {
      const PullRoute route = terms.route(p, ReduceOp::kSum);
      const bool own = p == s;
      PullOptions options{.digest = false};
      if (!own) options.private_access = Access::kStream;
      steps[p].program =
          std::make_shared<PullProgram>(reach_self(own ? "loopback" : "shm"), std::span(&route, 1), options);
      if (own) continue;
      std::unique_ptr<BounceRing> ring = BounceRing::create();
      const SourceRoute source{.what = terms.what(),
                               .src = terms.array(),
                               .data = reinterpret_cast<const std::byte*>(terms.peers[p].data()),
                               .streamed = true};
      Side& other = sides[1 - s];
      other.source = std::make_unique<SourceRun>(
          std::make_shared<SourceProgram>(std::span(&source, 1), SourceOptions{.digest = false}), other.sources,
          other.filled.callback(), "trainer/x", BounceRing::open(UniqueFd(::dup(ring->fd())), "x"));
      steps[p].stream = std::move(ring);
      steps[p].on_start = [run = other.source.get()] { run->start(1); };
    }
    sides[s].reduce = std::make_unique<ReduceRun>(std::move(steps), std::vector{terms.target(ReduceOp::kSum)},
                                                  sides[s].pulls, done.callback());
  }
  for (Side& side : sides) side.reduce->start(1);
  ASSERT_TRUE(done.wait(2));
  for (size_t s = 0; s < 2; ++s) {
    ASSERT_TRUE(sides[s].filled.wait());
    EXPECT_EQ(sides[s].reduce->status(), Status());
    EXPECT_EQ(ranks[s].result, ranks[s].expected(ReduceOp::kSum));
  }
}

TEST(ReduceRun, AnAbortEndsTheWholeChain) {
  Terms terms(2);
  WorkerPool pool(1, "pull");
  std::vector<ReduceRun::Step> steps(2);
  for (size_t p = 0; p < 2; ++p) {
    const PullRoute route = terms.route(p, ReduceOp::kSum);
    steps[p].program = std::make_shared<PullProgram>(reach_self("shm"), std::span(&route, 1),
                                                     PullOptions{.digest = false, .private_access = Access::kStream});
    steps[p].stream = BounceRing::create();
  }
  Completion done;
  ReduceRun run(std::move(steps), {terms.target(ReduceOp::kSum)}, pool, done.callback());
  run.start(1);
  run.abort(Status(ErrorCode::kPeerLost, "trainer/1 died"));
  ASSERT_TRUE(done.wait());
  EXPECT_EQ(run.status().code(), ErrorCode::kPeerLost);
}

}  // namespace
}  // namespace tessera
