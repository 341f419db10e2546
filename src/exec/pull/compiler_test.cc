#include "exec/pull/compiler.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <future>
#include <memory>

#include "exec/testing.h"
#include "tessera/memory.h"
#include "transport/exporter.h"
#include "transport/shm/bounce_ring.h"
#include "transport/transport.h"

namespace tessera {
namespace {

using exec_testing::Completion;
using exec_testing::fill_random;
using exec_testing::kPatience;
using exec_testing::own_endpoint;
using exec_testing::pick;
using exec_testing::plain_pull;
using exec_testing::Random;
using exec_testing::RandomRoute;
using exec_testing::reach_self;

enum class Way { kLoopback, kMapped, kReadv, kRing };

// One random batch of routes with memory on both sides, the sources shared or private.
class Batch {
 public:
  Batch(Random& random, Way way, size_t routes, DType from, DType to) : way_(way) {
    for (size_t r = 0; r < routes; ++r) add(random, RandomRoute::make(random, from, to));
    std::vector<RemoteKey> keys = exporter_.take_keys();
    for (uint32_t i = 0; i < keys.size(); ++i) peer_->add_key(i, std::move(keys[i]));
  }

  void pull(bool digest, WorkerPool& pulls, WorkerPool& sources) {
    PullOptions options{.digest = digest};
    if (way_ == Way::kReadv) options.private_access = Access::kGet;
    if (way_ == Way::kRing) options.private_access = Access::kStream;
    auto program = std::make_shared<PullProgram>(peer_, pull_routes_, options);
    for (SourceRoute& route : source_routes_) route.streamed = program->wants_stream();
    auto source = std::make_shared<SourceProgram>(source_routes_, SourceOptions{.digest = digest});
    ASSERT_EQ(program->wants_stream(), way_ == Way::kRing && program->bytes() > 0);
    ASSERT_EQ(source->fills_stream(), program->wants_stream());
    std::unique_ptr<BounceRing> drained, filled;
    if (program->wants_stream()) {
      drained = BounceRing::create();
      filled = BounceRing::open(UniqueFd(::dup(drained->fd())), "trainer/0");
    }
    Completion done;
    PullRun pull_run(program, pulls, done.callback(), std::move(drained));
    SourceRun source_run(source, sources, done.callback(), "inference/0", std::move(filled));
    for (uint32_t epoch = 1; epoch <= 3; ++epoch) {  // a run is reusable, and its digests full or sampled
      for (size_t r = 0; r < dst_.size(); ++r) dst_[r] = before_[r];
      const SampleSeed sample = epoch == 2 ? SampleSeed(kSeed) : std::nullopt;
      pull_run.start(epoch, sample);
      source_run.start(epoch, sample);
      ASSERT_TRUE(done.wait(2));
      EXPECT_EQ(pull_run.status(), Status());
      EXPECT_EQ(source_run.status(), Status());
      EXPECT_EQ(pull_run.bytes_done(), program->bytes());
      if (digest) check_digests(pull_run, source_run, sample ? sampled_ : digests_);
      check_elements();
    }
  }

 private:
  void add(Random& random, RandomRoute route) {
    std::byte* src = nullptr;
    if (way_ == Way::kMapped) {
      shared_.push_back(SharedHeap::process().allocate(route.src.size));
      src = shared_.back().data();
    } else {
      private_.push_back(std::make_unique<std::byte[]>(route.src.size));
      src = private_.back().get();
    }
    fill_random(random, src, route.src.size);
    std::vector<std::byte> dst(route.dst.size);
    fill_random(random, dst.data(), dst.size());
    before_.push_back(dst);
    expected_.push_back(dst);
    route.what.tensor = static_cast<uint32_t>(random());
    digests_.push_back(plain_pull(route, src, expected_.back().data()));
    sampled_.push_back(plain_pull(route, src, std::vector<std::byte>(route.dst.size).data(), kSeed));
    dst_.push_back(std::move(dst));
    source_routes_.push_back({.what = route.what, .src = route.src.array, .data = src + route.src.first});
    pull_routes_.push_back({.what = route.what,
                            .src = route.src.array,
                            .memory = exporter_.add({.data = src, .bytes = route.src.size}).range,
                            .origin = route.src.first,
                            .dst = route.dst.array,
                            .dst_dtype = route.dst_dtype,
                            .data = dst_.back().data() + route.dst.first});
  }

  void check_elements() {
    for (size_t r = 0; r < dst_.size(); ++r) {
      const RouteRegion& what = pull_routes_[r].what;
      ASSERT_EQ(dst_[r], expected_[r]) << to_string_shape(what.shape) << " " << what.region.to_string();
    }
  }
  void check_digests(const PullRun& pull_run, const SourceRun& source_run, const std::vector<Digest>& expected) {
    for (size_t r = 0; r < dst_.size(); ++r) {
      const RouteRegion& what = pull_routes_[r].what;
      ASSERT_EQ(pull_run.digests()[r], expected[r]) << to_string_shape(what.shape) << " " << what.region.to_string();
      ASSERT_EQ(source_run.digests()[r], expected[r]);
    }
  }

  Way way_;
  const TransportRegistry transports_{{TransportRegistry::builtin().find(way_ == Way::kLoopback ? "loopback" : "shm")}};
  Exporter exporter_{transports_, own_endpoint(), own_endpoint()};
  const std::shared_ptr<PeerMemory> peer_ = std::make_shared<PeerMemory>(transports_, own_endpoint(), own_endpoint());
  std::vector<SharedBuffer> shared_;
  std::vector<std::unique_ptr<std::byte[]>> private_;
  std::vector<std::vector<std::byte>> dst_, before_, expected_;
  static constexpr uint64_t kSeed = 3;  // of what is sampled; tensors differ
  std::vector<Digest> digests_, sampled_;
  std::vector<SourceRoute> source_routes_;
  std::vector<PullRoute> pull_routes_;
};

class EveryWay : public testing::TestWithParam<Way> {};

TEST_P(EveryWay, CopiesExactlyTheRegionForEveryElementTypeAndStride) {
  Random random(20 + static_cast<uint64_t>(GetParam()));
  WorkerPool pulls(2, "pull"), sources(1, "source");
  for (const DType dtype : all_dtypes())
    for (int batch = 0; batch < 4; ++batch)
      Batch(random, GetParam(), 12, dtype, dtype).pull(batch % 2 == 0, pulls, sources);
}

TEST_P(EveryWay, CastsOnTheWay) {
  Random random(40 + static_cast<uint64_t>(GetParam()));
  WorkerPool pulls(1, "pull"), sources(1, "source");
  for (const DType from : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16})
    for (const DType to : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16})
      if (from != to) Batch(random, GetParam(), 8, from, to).pull(true, pulls, sources);
}

std::string name_of_way(const testing::TestParamInfo<Way>& way) {
  constexpr const char* kNames[] = {"Loopback", "Mapped", "Readv", "Ring"};
  return kNames[static_cast<int>(way.param)];
}

INSTANTIATE_TEST_SUITE_P(Paths, EveryWay, testing::Values(Way::kLoopback, Way::kMapped, Way::kReadv, Way::kRing),
                         name_of_way);

// Two columns' halves of a matrix, large enough for many units, slots and requests.
struct LargeMatrix {
  static constexpr Index kRows = 3000;
  static constexpr Index kColumns = 1500;
  std::vector<float> src = std::vector<float>(kRows * kColumns);
  std::vector<float> dst = std::vector<float>(kRows * kColumns / 2);

  LargeMatrix() {
    for (size_t i = 0; i < src.size(); ++i) src[i] = static_cast<float>(i);
  }
  PullRoute route() {
    const Region right({IntervalSet({0, kRows}), IntervalSet({kColumns / 2, kColumns})});
    return {.what = {.shape = {kRows, kColumns}, .dtype = DType::kF32, .region = right},
            .src = {Region::full(Shape{kRows, kColumns}), {kColumns * 4, 4}},
            .memory = own_range(src.data(), src.size() * 4),
            .dst = {right, {kColumns / 2 * 4, 4}},
            .dst_dtype = DType::kF32,
            .data = reinterpret_cast<std::byte*>(dst.data())};
  }
  SourceRoute source() {
    const PullRoute pull = route();
    return {.what = pull.what, .src = pull.src, .data = reinterpret_cast<const std::byte*>(src.data())};
  }
  // Of the blocks that are chosen.
  Digest sampled(uint64_t seed) const {
    std::vector<float> image(src.size());
    const DigestSample sample(seed, 0);
    for (size_t i = 0; i < src.size(); ++i)
      if (static_cast<Index>(i) % kColumns >= kColumns / 2 && i / 4096 == sample.block(i / 65536)) image[i] = src[i];
    Digest digest{.elements = dst.size()};
    digest_bytes(digest, 0, reinterpret_cast<const std::byte*>(image.data()), image.size() * sizeof(float));
    return digest;
  }
  bool arrived() const {
    for (Index r = 0; r < kRows; ++r)
      for (Index c = 0; c < kColumns / 2; ++c)
        if (dst[static_cast<size_t>(r * kColumns / 2 + c)] != static_cast<float>(r * kColumns + kColumns / 2 + c))
          return false;
    return true;
  }
};

TEST(PullRun, SpreadsLargeTensorsOverManyUnitsOnEveryPath) {
  for (const Access path : {Access::kMap, Access::kGet, Access::kStream}) {
    LargeMatrix matrix;
    const PullRoute route = matrix.route();
    SourceRoute source_route = matrix.source();
    WorkerPool pulls(3, "pull"), sources(2, "source");
    const auto peer = reach_self(path == Access::kMap ? "loopback" : "shm");
    PullOptions options;
    if (path != Access::kMap) options.private_access = path;
    auto program = std::make_shared<PullProgram>(peer, std::span(&route, 1), options);
    EXPECT_EQ(program->bytes(path), program->bytes());
    source_route.streamed = program->wants_stream();
    auto source = std::make_shared<SourceProgram>(std::span(&source_route, 1), SourceOptions{});
    std::unique_ptr<BounceRing> drained, filled;
    if (program->wants_stream()) {
      drained = BounceRing::create();
      filled = BounceRing::open(UniqueFd(::dup(drained->fd())), "trainer/0");
    }
    Completion done;
    PullRun pull_run(program, pulls, done.callback(), std::move(drained));
    SourceRun source_run(source, sources, done.callback(), "inference/0", std::move(filled));
    pull_run.start(7);
    source_run.start(7);
    ASSERT_TRUE(done.wait(2));
    EXPECT_EQ(pull_run.status(), Status());
    EXPECT_TRUE(matrix.arrived()) << to_string(path);
    EXPECT_EQ(pull_run.digests()[0], source_run.digests()[0]) << to_string(path);
    EXPECT_EQ(pull_run.digests()[0].elements, matrix.dst.size());
    const Digest full = pull_run.digests()[0];
    pull_run.start(8, 5);
    source_run.start(8, 5);
    ASSERT_TRUE(done.wait(2));
    EXPECT_EQ(pull_run.digests()[0], source_run.digests()[0]) << to_string(path);
    EXPECT_EQ(pull_run.digests()[0], matrix.sampled(5));
    EXPECT_NE(pull_run.digests()[0], full);
  }
}

TEST(PullProgram, RefusesARouteThatLeavesThePeersMemory) {
  LargeMatrix matrix;
  PullRoute route = matrix.route();
  route.memory.bytes -= 4;
  EXPECT_THROW(PullProgram(reach_self("shm"), std::span(&route, 1), {}), Error);
  route = matrix.route();
  route.origin = 8;
  EXPECT_THROW(PullProgram(reach_self("shm"), std::span(&route, 1), {}), Error);
  route = matrix.route();
  route.src.strides[0] = INT64_MAX / 2;
  EXPECT_THROW(PullProgram(reach_self("shm"), std::span(&route, 1), {}), Error);
  route = matrix.route();
  route.memory.key = kOwnPacked;  // which it has not given
  EXPECT_THROW(PullProgram(reach_self("shm"), std::span(&route, 1), {}), Error);
}

TEST(PullRun, EndsWhenAbortedWhileTheSenderIsSilent) {
  LargeMatrix matrix;
  const PullRoute route = matrix.route();
  WorkerPool pulls(1, "pull");
  auto program = std::make_shared<PullProgram>(reach_self("shm"), std::span(&route, 1),
                                               PullOptions{.private_access = Access::kStream});
  Completion done;
  PullRun run(program, pulls, done.callback(), BounceRing::create(), {.stall = kPatience});
  run.start(1);
  run.abort(Status(ErrorCode::kCancelled, "the user gave up"));
  ASSERT_TRUE(done.wait());
  EXPECT_EQ(run.status().code(), ErrorCode::kCancelled);
  run.abort(Status(ErrorCode::kPeerLost, "too late"));
  EXPECT_EQ(run.status().code(), ErrorCode::kCancelled);
}

// Occupies a thread until it is let go.
class Occupation final : public Job {
 public:
  explicit Occupation(WorkerPool& pool) { pool.submit(*this); }
  void run(std::span<std::byte> /*scratch*/) override { gate_.get_future().wait_for(kPatience); }
  void end() { gate_.set_value(); }

 private:
  std::promise<void> gate_;
};

TEST(PullRun, ARingThatWaitsForAThreadHasNotBegun) {
  LargeMatrix matrix;
  const PullRoute route = matrix.route();
  WorkerPool pulls(1, "pull");
  Occupation other(pulls);
  auto program = std::make_shared<PullProgram>(reach_self("shm"), std::span(&route, 1),
                                               PullOptions{.private_access = Access::kStream});
  auto drained = BounceRing::create();
  const auto filled = BounceRing::open(UniqueFd(::dup(drained->fd())), "trainer/0");
  Completion done;
  PullRun run(program, pulls, done.callback(), std::move(drained), {.stall = kPatience});
  run.start(1);
  filled->begin_produce(1);
  EXPECT_TRUE(filled->reserve(Deadline::after(Duration::zero())).empty());
  other.end();
  EXPECT_FALSE(filled->reserve(Deadline::after(kPatience)).empty());
  run.abort(Status(ErrorCode::kCancelled, "seen enough"));
  ASSERT_TRUE(done.wait());
}

TEST(SourceRun, IsNotStalledByAReceiverThatHasNotBegun) {
  constexpr Index kElements = 1000;  // a frame: with a ring that has begun it never waits
  const std::vector<float> src(kElements, 1.5f);
  const Region whole = Region::full(Shape{kElements});
  const SourceRoute route{.what = {.shape = {kElements}, .dtype = DType::kF32, .region = whole},
                          .src = {whole, {4}},
                          .data = reinterpret_cast<const std::byte*>(src.data()),
                          .streamed = true};
  WorkerPool sources(1, "source");
  auto ring = BounceRing::create();
  UniqueFd fd(::dup(ring->fd()));
  Completion done;
  SourceRun run(std::make_shared<SourceProgram>(std::span(&route, 1), SourceOptions{}), sources, done.callback(),
                "inference/0", std::move(ring), {.stall = Duration::zero()});
  run.start(1);
  const auto consumer = BounceRing::open(std::move(fd), "trainer/0");
  consumer->begin_consume(1);
  EXPECT_EQ(consumer->acquire(Deadline::after(kPatience)).size(), kElements * sizeof(float));
  ASSERT_TRUE(done.wait());
  EXPECT_EQ(run.status(), Status());
}

TEST(PullRun, EndsAtTheStallLimitWhenNothingComes) {
  LargeMatrix matrix;
  const PullRoute route = matrix.route();
  WorkerPool pulls(1, "pull");
  auto program = std::make_shared<PullProgram>(reach_self("shm"), std::span(&route, 1),
                                               PullOptions{.private_access = Access::kStream});
  Completion done;
  PullRun run(program, pulls, done.callback(), BounceRing::create(), {.stall = std::chrono::milliseconds(20)});
  run.start(1);
  ASSERT_TRUE(done.wait());
  EXPECT_EQ(run.status().code(), ErrorCode::kDeadlineExceeded);
  EXPECT_NE(run.status().message().find("trainer/0"), std::string::npos);
}

}  // namespace
}  // namespace tessera
