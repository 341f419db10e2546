#include "exec/local_runs.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <vector>

#include "exec/testing.h"
#include "tessera/memory.h"

namespace tessera {
namespace {

using exec_testing::Completion;
using exec_testing::own_endpoint;

// A factory of this process, and an f32 tensor with 1, 2, ... in private memory.
class LocalRunsTest : public testing::Test {
 protected:
  static constexpr size_t kBytes = 8 * 16 * sizeof(float);

  LocalRunsTest() { std::iota(values_.begin(), values_.end(), 1.0f); }

  SourceRoute route_from(const void* data) const {
    return {.what = what_, .src = array_, .data = static_cast<const std::byte*>(data)};
  }
  // A route into `into`, from `memory`.
  PullRoute route_into(std::vector<float>& into, const RemoteRange& memory) const {
    return {.what = what_,
            .src = array_,
            .memory = memory,
            .dst = array_,
            .dst_dtype = DType::kF32,
            .data = reinterpret_cast<std::byte*>(into.data())};
  }
  // The only key, for memory that its owner packs into a stream.
  static std::vector<RemoteKey> packed_key() {
    std::vector<RemoteKey> keys;
    keys.push_back(TransportRegistry::builtin().find("shm")->export_region({.packed = true}));
    return keys;
  }

  const Shape shape_{8, 16};
  const RouteRegion what_{.tensor = 0, .shape = shape_, .dtype = DType::kF32, .region = Region::full(shape_)};
  const LocalArray array_{.owned = Region::full(shape_), .strides = {64, 4}};
  WorkerPool pull_pool_{1, "test-pull"};
  WorkerPool source_pool_{1, "test-src"};
  LocalRuns runs_{own_endpoint().name, pull_pool_, source_pool_};
  std::vector<float> values_ = std::vector<float>(8 * 16);
  std::vector<float> arrived_ = std::vector<float>(8 * 16);
};

TEST_F(LocalRunsTest, CopiesWithinThisProcess) {
  Completion done;
  const std::vector<PullRoute> routes{route_into(arrived_, own_range(values_.data(), kBytes))};
  const auto run = runs_.make_copy(routes, done.callback());
  runs_.await_made(Deadline::after(exec_testing::kPatience), {});
  run->start(1);
  ASSERT_TRUE(done.wait());
  EXPECT_TRUE(run->status().ok()) << run->status().message();
  EXPECT_EQ(arrived_, values_);
}

TEST_F(LocalRunsTest, ASourceFillsTheStreamThatAPullDrains) {
  Completion filled, drained;
  std::vector<SourceRoute> sources{route_from(values_.data())};
  RunFactory::Source source = runs_.make_source(own_endpoint(), true, filled.callback());
  EXPECT_FALSE(source.runs->add_slot(sources));  // it has no streamed route
  sources.front().streamed = true;
  ASSERT_TRUE(source.runs->add_slot(sources));
  const auto pulls = runs_.make_pull(own_endpoint(), packed_key(), true);
  const std::vector<PullRoute> routes{route_into(arrived_, {.key = 0, .offset = 0, .bytes = kBytes})};
  pulls->add_slot(routes);
  ASSERT_EQ(pulls->slots(), 1u);
  ASSERT_TRUE(pulls->program(0)->wants_stream());
  pulls->make_runs(std::move(source.consumer), drained.callback());
  for (const uint32_t epoch : {1u, 2u}) {
    values_.back() = static_cast<float>(epoch);
    pulls->run(0).start(epoch);
    source.runs->run(0).start(epoch);
    ASSERT_TRUE(filled.wait() && drained.wait());
    EXPECT_TRUE(pulls->run(0).status().ok()) << pulls->run(0).status().message();
    EXPECT_EQ(arrived_, values_);
    ASSERT_EQ(source.runs->run(0).digests().size(), 1u);
    EXPECT_EQ(source.runs->run(0).digests()[0], pulls->run(0).digests()[0]);
  }
}

TEST_F(LocalRunsTest, DigestsAreTheSameInSharedMemory) {
  const std::shared_ptr<std::byte> shared = runs_.allocate(kBytes, 64);
  std::memcpy(shared.get(), values_.data(), kBytes);
  const Transport* const shm = TransportRegistry::builtin().find("shm");
  EXPECT_TRUE(shm->locate(runs_.describe(shared.get(), kBytes)).caps.has(Access::kMap));
  EXPECT_TRUE(runs_.reaches(shared.get()));

  Completion done;
  const std::vector<SourceRoute> both{route_from(shared.get()), route_from(values_.data())};
  const auto digests = runs_.make_digests(both, done.callback());
  digests->start(1);
  ASSERT_TRUE(done.wait());
  ASSERT_EQ(digests->digests().size(), 2u);
  EXPECT_EQ(digests->digests()[0], digests->digests()[1]);
}

TEST_F(LocalRunsTest, WhatIsNoStreamIsRefused) {
  const auto pulls = runs_.make_pull(own_endpoint(), packed_key(), false);
  const std::vector<PullRoute> routes{route_into(arrived_, {.key = 0, .offset = 0, .bytes = kBytes})};
  pulls->add_slot(routes);
  try {
    pulls->make_runs({}, [] {});
    FAIL() << "it was taken for one";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace tessera
