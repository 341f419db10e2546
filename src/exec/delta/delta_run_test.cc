#include "exec/delta/delta_run.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>

#include "exec/delta/delta_reader.h"
#include "exec/pull/source.h"
#include "exec/testing.h"
#include "memory/host/shared_arena.h"
#include "tessera/memory.h"
#include "transport/shm/bounce_ring.h"
#include "transport/transport.h"

namespace tessera {
namespace {

using exec_testing::Completion;
using exec_testing::fill_random;
using exec_testing::pick;
using exec_testing::plain_pull;
using exec_testing::Random;
using exec_testing::RandomRoute;
using exec_testing::reach_self;

// The right halves of rows, in several segments and units; transposed or not at the receiver.
constexpr Index kLargeRows = 1800;
constexpr Index kLargeColumns = 1200;

RandomRoute large_route(DType dtype, DType dst_dtype, bool transposed) {
  RandomRoute route;
  route.what = {.shape = {kLargeRows, kLargeColumns},
                .dtype = dtype,
                .region = Region({IntervalSet({0, kLargeRows}), IntervalSet({kLargeColumns / 2, kLargeColumns})})};
  route.dst_dtype = dst_dtype;
  const int64_t from = atom_bytes(dtype);
  const int64_t to = atom_bytes(dst_dtype);
  route.src = {.array = {Region::full(route.what.shape), {kLargeColumns * from, from}},
               .size = static_cast<size_t>(kLargeRows * kLargeColumns * from)};
  route.dst = {.array = {route.what.region, {kLargeColumns / 2 * to, to}},
               .size = static_cast<size_t>(kLargeRows * kLargeColumns / 2 * to)};
  if (transposed) route.dst.array.strides = {to, kLargeRows * to};
  return route;
}

// The expected contents of `dst`. (plain_pull() is too slow for it.)
void pull_right_half(const RandomRoute& route, const std::byte* src, std::byte* dst) {
  const std::vector<Index>& from = route.src.array.strides;
  const std::vector<Index>& to = route.dst.array.strides;
  for (Index r = 0; r < kLargeRows; ++r) {
    for (Index c = 0; c < kLargeColumns / 2; ++c) {
      const std::byte* const atom = src + r * from[0] + (kLargeColumns / 2 + c) * from[1];
      std::byte* const place = dst + r * to[0] + c * to[1];
      if (route.what.dtype == route.dst_dtype) {
        std::memcpy(place, atom, static_cast<size_t>(from[1]));
      } else {
        cast_row(route.what.dtype, route.dst_dtype)(atom, place, 1);
      }
    }
  }
}

// Some routes from one rank to another, sent in several versions.
class DeltaPair {
 public:
  DeltaPair(bool digest, WorkerPool& pool, Access way = Access::kMap) : digest_(digest), pool_(pool), way_(way) {}

  void add(Random& random, const RandomRoute& route) {
    routes_.push_back(route);
    src_.emplace_back(route.src.size);
    dst_.emplace_back(route.dst.size);
    fill_random(random, src_.back().data(), route.src.size);
    fill_random(random, dst_.back().data(), route.dst.size);
    program_routes_.push_back(
        {.what = route.what, .src = route.src.array, .cast = route.dst_dtype != route.what.dtype});
  }

  void build() {
    program_ = std::make_shared<DeltaProgram>(program_routes_, digest_);
    size_t piece_bytes = 0;
    std::vector<DeltaRun::Memory> memory;
    for (size_t r = 0; r < routes_.size(); ++r) {
      bases_.emplace_back(static_cast<size_t>(program_->piece(r).full_bytes()) + 1);
      memory.push_back({src_[r].data() + routes_[r].src.first, bases_[r].data(), piece_bytes});
      piece_bytes += (static_cast<size_t>(program_->piece(r).bytes()) + 63) / 64 * 64;
    }
    pieces_ = std::make_unique<SparseMemory>(piece_bytes, "trainer/0");
    run_ = std::make_unique<DeltaRun>(program_, memory, *pieces_, pool_, done_.callback());
    const auto peer = reach_self(way_ == Access::kMap ? "loopback" : "shm");
    std::vector<PullRoute> pulls;
    for (size_t r = 0; r < routes_.size(); ++r) pulls.push_back(pull_route(r, memory[r]));
    PullOptions options{.digest = digest_};
    if (way_ != Access::kMap) options.private_access = way_;
    auto program = std::make_shared<PullProgram>(peer, pulls, options);
    ASSERT_EQ(program->wants_stream(), way_ == Access::kStream && program->bytes() > 0);
    std::unique_ptr<BounceRing> drained;
    if (program->wants_stream()) {
      drained = BounceRing::create();
      fill_from(memory, pulls, BounceRing::open(UniqueFd(::dup(drained->fd())), "trainer/0"));
    }
    pull_ = std::make_unique<PullRun>(program, pool_, done_.callback(), std::move(drained));
  }

  // Changes every atom of the sources with that chance. Returns whether any has changed.
  void change(Random& random, double chance) {
    for (size_t r = 0; r < routes_.size(); ++r) {
      const auto bytes = static_cast<size_t>(atom_bytes(routes_[r].what.dtype));
      for (size_t at = 0; at + bytes <= src_[r].size(); at += bytes)
        if (std::bernoulli_distribution(chance)(random)) src_[r][at] ^= std::byte{1};
    }
  }

  void prepare(bool compares) {
    run_->compare(compares);
    run_->start(++epoch_);
    ASSERT_TRUE(done_.wait());
    ASSERT_EQ(run_->status(), Status());
    ASSERT_EQ(run_->bytes_done(), run_->bytes());
  }

  // Sends deltas if there are any, unless `choose` decides otherwise.
  template <typename Choose>
  void receive(const Choose& choose) {
    std::vector<Travel> travel;
    for (size_t r = 0; r < routes_.size(); ++r)
      travel.push_back(run_->bytes_of(r) != DeltaRun::kFull && choose(r) ? Travel::kDelta : Travel::kFull);
    deltas_ = std::ranges::count(travel, Travel::kDelta);
    std::vector<int64_t> bytes;
    for (size_t r = 0; r < routes_.size(); ++r)
      bytes.push_back(travel[r] == Travel::kDelta ? run_->bytes_of(r) : DeltaRun::kFull);
    pull_->travel(travel, bytes);
    pull_->start(epoch_);
    if (source_) {
      source_->travel(bytes);
      source_->start(epoch_);
      ASSERT_TRUE(filled_.wait());
      ASSERT_EQ(source_->status(), Status());
    }
    ASSERT_TRUE(done_.wait());
    ASSERT_EQ(pull_->status(), Status());
    EXPECT_EQ(pull_->bytes_done(), pull_->bytes());
    for (size_t r = 0; r < routes_.size(); ++r) check(r, travel[r]);
  }

  int64_t deltas() const { return deltas_; }  // of the last receive()
  const DeltaRun& run() const { return *run_; }
  DeltaRun& run() { return *run_; }
  const DeltaProgram& program() const { return *program_; }
  size_t routes() const { return routes_.size(); }
  std::vector<std::byte>& destination(size_t r) { return dst_[r]; }
  Digest sent(size_t r) const { return run_->digests()[r]; }
  Digest arrived(size_t r) const { return pull_->digests()[r]; }
  SparseMemory& pieces() { return *pieces_; }
  PullRun& pull() { return *pull_; }
  Completion& done() { return done_; }

 private:
  void fill_from(const std::vector<DeltaRun::Memory>& memory, const std::vector<PullRoute>& pulls,
                 std::unique_ptr<ByteStream> stream) {
    std::vector<SourceRoute> sources;
    for (size_t r = 0; r < routes_.size(); ++r)
      sources.push_back({.what = pulls[r].what,
                         .src = pulls[r].src,
                         .data = memory[r].base,
                         .streamed = true,
                         .delta = pieces_->data() + memory[r].piece});
    source_ = std::make_unique<SourceRun>(std::make_shared<SourceProgram>(sources, SourceOptions{.digest = digest_}),
                                          fill_pool_, filled_.callback(), "inference/0", std::move(stream));
  }

  PullRoute pull_route(size_t r, const DeltaRun::Memory& memory) const {
    const RandomRoute& route = routes_[r];
    const auto bytes = static_cast<size_t>(program_->piece(r).full_bytes());
    std::vector<Index> strides(route.what.shape.size());
    if (!route.what.region.empty()) strides = byte_strides(route.what.dtype, route.what.region.extents());
    return {.what = route.what,
            .src = {.owned = route.what.region, .strides = strides},
            .memory = own_range(memory.base, bytes),
            .dst = route.dst.array,
            .dst_dtype = route.dst_dtype,
            .data = const_cast<std::byte*>(dst_[r].data()) + route.dst.first,
            .delta = own_range(pieces_->data() + memory.piece, static_cast<size_t>(program_->piece(r).bytes()))};
  }

  void check(size_t r, Travel travel) {
    std::vector<std::byte> expected = dst_[r];
    const bool large = program_->piece(r).segments() > 1;
    if (large) pull_right_half(routes_[r], src_[r].data(), expected.data());
    const Digest digest = large ? run_->digests()[r] : plain_pull(routes_[r], src_[r].data(), expected.data());
    ASSERT_EQ(dst_[r], expected) << to_string(routes_[r].what.dtype) << " to " << to_string(routes_[r].dst_dtype) << " "
                                 << routes_[r].what.region.to_string();
    if (!digest_) return;
    EXPECT_EQ(run_->digests()[r], digest);
    const bool cast = routes_[r].dst_dtype != routes_[r].what.dtype;
    if (travel == Travel::kDelta && cast) {
      EXPECT_EQ(pull_->digests()[routes_.size() + r], run_->digests()[routes_.size() + r]);
    } else {
      EXPECT_EQ(pull_->digests()[r], digest);
    }
  }

  const bool digest_;
  WorkerPool& pool_;
  const Access way_;
  WorkerPool fill_pool_{1, "fill"};
  std::vector<RandomRoute> routes_;
  std::vector<DeltaRoute> program_routes_;
  std::vector<std::vector<std::byte>> src_, dst_, bases_;
  std::shared_ptr<const DeltaProgram> program_;
  std::unique_ptr<SparseMemory> pieces_;
  Completion done_;
  std::unique_ptr<DeltaRun> run_;
  std::unique_ptr<PullRun> pull_;
  Completion filled_;
  std::unique_ptr<SourceRun> source_;  // with a stream
  uint32_t epoch_ = 0;
  int64_t deltas_ = 0;
};

constexpr double kChances[] = {0, 1e-2, 0.3, 1, 1e-2};

void send_versions(Random& random, DeltaPair& pair) {
  pair.build();
  pair.prepare(false);
  pair.receive([](size_t) { return true; });
  EXPECT_EQ(pair.deltas(), 0);
  for (const double chance : kChances) {
    pair.change(random, chance);
    pair.prepare(true);
    pair.receive([&](size_t) { return pick(random, 0, 4) != 0; });
    if (testing::Test::HasFailure()) return;
  }
}

TEST(DeltaRun, WhatArrivesIsWhatWasSentForEveryElementTypeAndStride) {
  Random random(1);
  WorkerPool pool(2, "delta");
  int64_t deltas = 0;
  for (const DType dtype : all_dtypes()) {
    for (int batch = 0; batch < 4; ++batch) {
      DeltaPair pair(batch % 2 == 0, pool);
      for (int r = 0; r < 10; ++r) pair.add(random, RandomRoute::make(random, dtype, dtype, 16));
      send_versions(random, pair);
      deltas += pair.deltas();
      ASSERT_FALSE(HasFailure()) << to_string(dtype);
    }
  }
  EXPECT_GT(deltas, 100);
}

TEST(DeltaRun, ChangesAreCastOnTheWay) {
  Random random(2);
  WorkerPool pool(1, "delta");
  for (const DType from : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3}) {
    for (const DType to : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
      if (from == to) continue;
      DeltaPair pair(true, pool);
      for (int r = 0; r < 8; ++r) pair.add(random, RandomRoute::make(random, from, to, 16));
      send_versions(random, pair);
      ASSERT_FALSE(HasFailure()) << to_string(from) << " to " << to_string(to);
    }
  }
}

TEST(DeltaRun, LargeTensorsAreCutIntoSegments) {
  Random random(3);
  WorkerPool pool(3, "delta");
  DeltaPair pair(true, pool);
  pair.add(random, large_route(DType::kBF16, DType::kBF16, false));
  pair.add(random, large_route(DType::kBF16, DType::kBF16, true));
  pair.add(random, large_route(DType::kF32, DType::kBF16, false));
  pair.add(random, large_route(DType::kF64, DType::kF64, false));
  pair.build();
  EXPECT_GT(pair.program().piece(0).segments(), 3);
  pair.prepare(false);
  pair.receive([](size_t) { return true; });
  for (const double chance : {1e-4, 1e-2, 0.5}) {
    pair.change(random, chance);
    pair.prepare(true);
    pair.receive([](size_t) { return true; });
    EXPECT_EQ(pair.deltas(), 4) << chance;
    ASSERT_FALSE(HasFailure()) << chance;
  }
}

TEST(DeltaRun, TellsWhatADeltaTakesAndWhenItTakesMoreThanTheRoute) {
  Random random(4);
  WorkerPool pool(1, "delta");
  DeltaPair pair(true, pool);
  pair.add(random, large_route(DType::kBF16, DType::kBF16, false));
  pair.build();
  const DeltaPiece& piece = pair.program().piece(0);
  pair.prepare(false);
  EXPECT_EQ(pair.run().bytes_of(0), DeltaRun::kFull);
  pair.receive([](size_t) { return true; });
  pair.prepare(true);
  EXPECT_EQ(pair.run().bytes_of(0), piece.count_bytes());
  pair.change(random, 0.5);
  pair.prepare(true);
  const double share = static_cast<double>(pair.run().bytes_of(0)) / static_cast<double>(piece.full_bytes());
  EXPECT_NEAR(share, 0.5 + 1.0 / 16 + 1.0 / 1024, 0.01);
  pair.receive([](size_t) { return true; });
  EXPECT_EQ(pair.deltas(), 1);
  pair.change(random, 1);
  pair.prepare(true);
  EXPECT_EQ(pair.run().bytes_of(0), DeltaRun::kFull);
}

// With many frames of a stream, and with many gets.
TEST(DeltaRun, DeltasNeedNotBeMapped) {
  Random random(8);
  WorkerPool pool(2, "delta");
  for (const Access way : {Access::kGet, Access::kStream}) {
    int64_t deltas = 0;
    for (const DType dtype : {DType::kU8, DType::kBF16, DType::kF4, DType::kF64}) {
      for (int batch = 0; batch < 3; ++batch) {
        DeltaPair pair(batch != 0, pool, way);
        for (int r = 0; r < 8; ++r) pair.add(random, RandomRoute::make(random, dtype, dtype, 16));
        send_versions(random, pair);
        deltas += pair.deltas();
        ASSERT_FALSE(HasFailure()) << to_string(dtype);
      }
    }
    EXPECT_GT(deltas, 10);
    DeltaPair large(true, pool, way);
    large.add(random, large_route(DType::kBF16, DType::kBF16, true));
    large.add(random, large_route(DType::kF32, DType::kBF16, false));
    large.add(random, large_route(DType::kF64, DType::kF64, false));
    large.build();
    large.prepare(false);
    large.receive([](size_t) { return true; });
    for (const double chance : {0.0, 1e-4, 1e-2, 0.5}) {
      large.change(random, chance);
      large.prepare(true);
      large.receive([](size_t) { return true; });
      EXPECT_EQ(large.deltas(), 3) << chance;
      ASSERT_FALSE(HasFailure()) << chance;
    }
  }
}

// On another base, a delta gives another result, which the digest of the destination shows.
TEST(DeltaRun, TheDigestTellsOfADestinationThatHeldSomethingElse) {
  Random random(5);
  WorkerPool pool(1, "delta");
  DeltaPair pair(true, pool);
  pair.add(random, large_route(DType::kF32, DType::kF32, true));
  pair.build();
  pair.prepare(false);
  pair.receive([](size_t) { return true; });
  pair.change(random, 1e-3);
  pair.prepare(true);
  pair.destination(0)[12345] ^= std::byte{1};
  const Travel delta[] = {Travel::kDelta};
  pair.pull().travel(delta);
  pair.pull().start(9);
  ASSERT_TRUE(pair.done().wait());
  EXPECT_FALSE(pair.arrived(0) == pair.sent(0));
  pair.receive([](size_t) { return false; });
  EXPECT_EQ(pair.arrived(0), pair.sent(0));
}

TEST(DeltaRun, RoutesThatNeedNotTravelStayAsTheyAre) {
  Random random(6);
  WorkerPool pool(1, "delta");
  DeltaPair pair(true, pool);
  for (int r = 0; r < 2; ++r) pair.add(random, large_route(DType::kI16, DType::kI16, false));
  pair.build();
  pair.prepare(false);
  const std::vector<std::byte> before = pair.destination(0);
  const Travel travel[] = {Travel::kNot, Travel::kFull};
  pair.pull().travel(travel);
  pair.pull().start(1);
  ASSERT_TRUE(pair.done().wait());
  EXPECT_EQ(pair.destination(0), before);
  EXPECT_EQ(pair.arrived(0), Digest{});
  EXPECT_EQ(pair.arrived(1), pair.sent(1));
}

// Whatever the piece holds, only the region is written and only the piece is read; also a test for the sanitizers.
TEST(DeltaReader, StaysWithinThePieceAndTheRegionWhateverItReads) {
  Random random(7);
  for (const DType dtype : {DType::kU8, DType::kBF16, DType::kF64}) {
    for (int step = 0; step < 200; ++step) {
      const RandomRoute route = RandomRoute::make(random, dtype, dtype, 12);
      const DeltaPiece piece(route.what);
      std::vector<std::byte> bytes(static_cast<size_t>(piece.bytes()));
      fill_random(random, bytes.data(), bytes.size());
      if (step % 2 == 0) std::fill_n(bytes.begin(), piece.head_bytes(), std::byte{0xFF});
      std::vector<std::byte> dst(route.dst.size);
      std::vector<std::byte> ones(route.src.size, std::byte{1});
      std::vector<std::byte> reached(route.dst.size);
      plain_pull(route, ones.data(), reached.data());
      PullRoute pull{.what = route.what, .dst = route.dst.array, .dst_dtype = dtype};
      pull.data = dst.data() + route.dst.first;
      const DeltaReader reader(pull);
      std::vector<std::byte> scratch(DeltaReader::kScratchBytes);
      Digest digest;
      for (int64_t segment = 0; segment < piece.segments(); ++segment)
        reader.apply(segment, DeltaSegment::of_piece(piece, bytes.data(), segment), scratch, &digest);
      for (size_t i = 0; i < dst.size(); ++i) ASSERT_TRUE(dst[i] == std::byte{0} || reached[i] == std::byte{1}) << i;
      EXPECT_LE(digest.elements, static_cast<uint64_t>(piece.atoms()));
    }
  }
}

TEST(PullProgram, RefusesADeltaPieceThatIsTooSmall) {
  WorkerPool pool(1, "delta");
  const RandomRoute route = large_route(DType::kF32, DType::kF32, false);
  std::vector<std::byte> memory(route.src.size);
  PullRoute pull{.what = route.what,
                 .src = route.src.array,
                 .memory = own_range(memory.data(), memory.size()),
                 .dst = route.dst.array,
                 .dst_dtype = DType::kF32,
                 .data = memory.data()};
  pull.delta = own_range(memory.data(), static_cast<size_t>(DeltaPiece(route.what).bytes()) - 1);
  EXPECT_THROW(PullProgram(reach_self("loopback"), std::span(&pull, 1), {}), Error);
  pull.delta = own_range(memory.data(), static_cast<size_t>(DeltaPiece(route.what).bytes()));
  EXPECT_EQ(PullProgram(reach_self("loopback"), std::span(&pull, 1), {}).delta_routes(), 1U);
  EXPECT_EQ(PullProgram(reach_self("shm"), std::span(&pull, 1), {}).delta_routes(), 1U);
}

}  // namespace
}  // namespace tessera
