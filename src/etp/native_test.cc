// Weights whose shard is their quantised planes: with a master of the caller's, or without one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/testing.h"
#include "collective/group.h"
#include "etp/etp_testing.h"

namespace tessera::etp {
namespace {

using testing::HasSubstr;

using Floats = std::vector<float>;

Floats values_of(const FullWeight& full) {
  const auto* data = static_cast<const float*>(full.data());
  return {data, data + full.rows() * full.columns()};
}

// This rank's rows of a version, in memory of its own.
Floats master_of(Runtime& runtime, WeightId weight, int64_t version) {
  const RowRange rows = runtime.rows(weight);
  Floats values;
  for (int64_t row = rows.begin; row < rows.end; ++row)
    for (int64_t column = 0; column < runtime.spec(weight).columns; ++column)
      values.push_back(weight_value(weight, row, column, version));
  return values;
}

TEST(NativeTest, AWeightIsPublishedFromItsMaster) {
  run_ranks(2, [](ShardGroup group) {
    Runtime runtime(group, prefetching());
    const WeightId w = runtime.add({.name = "w", .rows = 64, .columns = 16, .format = "mxfp8", .native = true});
    EXPECT_EQ(runtime.shard(w), nullptr);
    std::vector<float> master(static_cast<size_t>(runtime.rows(w).size() * 16), 0.5F);
    runtime.set_master(w, master.data(), DType::kF32);
    runtime.start();
    EXPECT_EQ(static_cast<const float*>(runtime.acquire(w, Phase::kForward).data())[700], 0.5F);
    runtime.update({{w}}, [&] { std::ranges::fill(master, 2.0F); });
    EXPECT_EQ(static_cast<const float*>(runtime.acquire(w, Phase::kBackward).data())[700], 2.0F);
    EXPECT_EQ(runtime.report().shard_bytes, 0);
    EXPECT_EQ(runtime.report().master_bytes, runtime.rows(w).size() * 16 * 4);
    EXPECT_EQ(runtime.forecast().masters, runtime.report().master_bytes);
  });
}

TEST(NativeTest, ExpertsOfAStackHaveTheValuesOfAStackThatIsNotNative) {
  constexpr int kExperts = 3;
  run_ranks(2, [](ShardGroup group) {
    Runtime runtime(group, prefetching());
    const WeightSpec spec{.name = "a", .rows = 40, .columns = 32, .format = "nvfp4"};
    WeightSpec native = spec;
    native.name = "b";
    native.native = true;
    const std::vector<WeightId> shared = runtime.add_stack(spec, kExperts);
    const std::vector<WeightId> own = runtime.add_stack(native, kExperts);
    std::vector<Floats> masters;
    for (int e = 0; e < kExperts; ++e) {
      fill_shard(runtime, shared[e], 1);
      masters.push_back(master_of(runtime, shared[e], 1));
      EXPECT_EQ(runtime.shard(own[e]), nullptr);
    }
    for (int e = 0; e < kExperts; ++e) runtime.set_master(own[e], masters[e].data(), DType::kF32);
    runtime.start();
    for (int64_t step = 1; step < 4; ++step) {
      const auto expected = runtime.acquire(shared, Phase::kForward, {.expects_backward = false});
      const auto found = runtime.acquire(own, Phase::kForward, {.expects_backward = false});
      ASSERT_EQ(found.size(), 1U);
      EXPECT_EQ(found[0].rows(), kExperts * 40);
      EXPECT_EQ(values_of(found[0]), values_of(expected[0]));
      EXPECT_EQ(values_of(runtime.acquire(own[1], Phase::kForward)),
                values_of(runtime.acquire(shared[1], Phase::kForward)));
      std::vector<WeightId> all = shared;
      all.insert(all.end(), own.begin(), own.end());
      runtime.update(all, [&] {
        for (int e = 0; e < kExperts; ++e) {
          fill_shard(runtime, shared[e], step + 1);
          std::ranges::copy(master_of(runtime, shared[e], step + 1), masters[e].begin());
        }
      });
    }
    const int64_t bytes = runtime.rows(own[0]).size() * 32 * 4;
    const RuntimeReport report = runtime.report();
    EXPECT_EQ(report.shard_bytes, kExperts * bytes);
    EXPECT_EQ(report.master_bytes, kExperts * bytes);
    EXPECT_EQ(report.weights[own[2]].shard_bytes, 0);
    EXPECT_EQ(report.weights[own[2]].master_bytes, bytes);
    EXPECT_EQ(runtime.forecast().masters, kExperts * bytes);
  });
}

// This rank's rows of a whole weight.
Floats rows_of(const Runtime& runtime, WeightId weight, const Floats& full) {
  const RowRange rows = runtime.rows(weight);
  const int64_t columns = runtime.spec(weight).columns;
  return {full.begin() + rows.begin * columns, full.begin() + rows.end * columns};
}

Floats read_rows(const Runtime& runtime, WeightId weight) {
  Floats own(static_cast<size_t>(runtime.rows(weight).size() * runtime.spec(weight).columns));
  runtime.read_rows(weight, own.data(), DType::kF32);
  return own;
}

void use_without_a_master(ShardGroup group, PublishAt when) {
  RuntimeOptions options = prefetching();
  options.publish = when;
  Runtime runtime(group, options);
  WeightSpec spec{.name = "w", .rows = 70, .columns = 32, .format = "mxfp8", .frozen = true, .native = true};
  spec.planes_only = true;
  const WeightId w = runtime.add(spec);
  const WeightId other = runtime.add({.name = "v", .rows = 64, .columns = 32});
  Floats rows = master_of(runtime, w, 1);
  runtime.set_master(w, rows.data(), DType::kF32);
  runtime.start();
  const Floats before = values_of(runtime.acquire(w, Phase::kForward));
  std::ranges::fill(rows, std::nanf(""));  // nobody reads it any longer
  EXPECT_EQ(runtime.report().master_bytes, 0);
  EXPECT_EQ(runtime.forecast().masters, 0);
  runtime.update({{w, other}}, [] {});
  EXPECT_EQ(runtime.version(w), 1);
  EXPECT_EQ(values_of(runtime.acquire(w, Phase::kForward)), before);
  EXPECT_EQ(read_rows(runtime, w), rows_of(runtime, w, before));
  EXPECT_THAT(error_of([&] { runtime.set_master(w, rows.data(), DType::kF32); }), HasSubstr("outside of an update"));
  EXPECT_THAT(error_of([&] { runtime.set_frozen(w, false); }), HasSubstr("\"w\" has no master"));
  rows = master_of(runtime, w, 5);
  runtime.update({{other}}, [&] { runtime.set_master(w, rows.data(), DType::kF32); });
  EXPECT_EQ(runtime.version(w), 2);
  EXPECT_EQ(runtime.report().master_bytes, 0);
  const Floats after = values_of(runtime.acquire(w, Phase::kForward));
  EXPECT_NE(after, before);
  runtime.update({{other}}, [] {});
  EXPECT_EQ(runtime.version(w), 2);
  EXPECT_EQ(values_of(runtime.acquire(w, Phase::kForward)), after);
  group.impl()->barrier("end");
}

TEST(NativeTest, WithoutAMasterPlanesStayUntilRowsAreGiven) {
  for (const PublishAt when : {PublishAt::kUpdate, PublishAt::kFirstUse})
    run_ranks(2, [when](ShardGroup group) { use_without_a_master(group, when); });
}

TEST(NativeTest, RowsAreReadAsUsesSeeThemByEachOfTheirOwners) {
  run_ranks(3, [](ShardGroup group) {
    Runtime runtime(group, prefetching());
    for (const char* format : {"", "bf16", "fp8_e4m3", "mxfp8", "nvfp4"})
      fill_shard(runtime,
                 runtime.add({.name = fmt::format("w{}", format),
                              .rows = 50,
                              .columns = 32,
                              .format = format,
                              .compute = DType::kF32}),
                 2);
    runtime.start();
    for (WeightId w = 0; w < 5; ++w) {
      const Floats full = values_of(runtime.acquire(w, Phase::kForward));
      EXPECT_EQ(read_rows(runtime, w), rows_of(runtime, w, full)) << w;
    }
    std::byte nothing{};
    EXPECT_THAT(error_of([&] { runtime.read_rows(0, &nothing, DType::kI64); }), HasSubstr("cannot be read as i64"));
    group.impl()->barrier("end");
  });
}

TEST(NativeTest, OnlyFrozenNativeWeightsDoWithoutAMaster) {
  Runtime runtime(ShardGroup::single(test_group()), {});
  WeightSpec spec{.name = "w", .rows = 64, .columns = 32, .format = "nvfp4", .native = true, .planes_only = true};
  EXPECT_THAT(error_of([&] { runtime.add(spec); }), HasSubstr("only a native weight that is frozen"));
  spec.frozen = true;
  spec.native = false;
  EXPECT_THAT(error_of([&] { runtime.add_stack(spec, 2); }), HasSubstr("only a native weight that is frozen"));
}

}  // namespace
}  // namespace tessera::etp
