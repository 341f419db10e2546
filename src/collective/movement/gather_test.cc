#include "collective/movement/gather.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <list>
#include <numeric>
#include <random>

#include "codec/codec_testing.h"
#include "codec/simd/cast.h"
#include "collective/group_testing.h"

namespace tessera::collective {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// The rows of each rank, padded to whole multiples of `alignment`: the last ranks may have fewer, or none.
std::vector<std::pair<int64_t, int64_t>> cut(int64_t rows, int ranks, int64_t alignment) {
  const int64_t unit = alignment * ranks;
  const int64_t share = (rows + unit - 1) / unit * unit / ranks;
  std::vector<std::pair<int64_t, int64_t>> cuts;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const int64_t begin = std::min(rank * share, rows);
    cuts.emplace_back(begin, std::min(begin + share, rows) - begin);
  }
  return cuts;
}

struct Case {
  std::optional<QuantSpec> spec{};
  Plane plane = Plane::kRow;
  DType source = DType::kF32;  // of plain rows; of quantised ones, what is quantised
  DType to = DType::kF32;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t alignment = 1;
  int64_t gap = 0;  // elements between rows of the gathered matrix

  std::string text() const {
    return fmt::format("{} {} of {} to {} [{}, {}]", spec ? to_string(spec->format) : "plain", to_string(plane),
                       to_string(source), to_string(to), rows, columns);
  }
};

// What all ranks publish of one weight, quantised rank by rank with the amax of the whole, and what a gather must give:
// the whole matrix, quantised and dequantised at once.
class Weight {
 public:
  Weight(const Case& test, int ranks, uint64_t seed)
      : test_(test), whole_(bytes(test.source, test.rows * test.columns)) {
    std::mt19937_64 random(seed);
    std::vector<float> values(static_cast<size_t>(test.rows * test.columns));
    for (float& value : values) value = static_cast<float>(random() % 4096) / 256 - 8;
    if (!values.empty()) cast_row(DType::kF32, test.source)(values.data(), whole_.data(), values.size());
    published_ = std::make_shared<PublishedWeight>();
    published_->rows = test.rows;
    published_->columns = test.columns;
    published_->dtype = test.source;
    published_->spec = test.spec;
    published_->plane = test.plane;
    if (test.spec) amax_ = compute_amax(std::vector{view(0, test.rows)})[0].value;
    published_->amax = &amax_;
    for (const auto& [begin, count] : cut(test.rows, ranks, test.alignment)) publish(begin, count);
    check_published(*published_, ranks, "w");
  }

  std::shared_ptr<const PublishedWeight> published() const { return published_; }

  std::vector<std::byte> expected() const {
    const auto elements = static_cast<size_t>(test_.rows * test_.columns);
    std::vector<std::byte> out(bytes(test_.to, test_.rows * test_.columns));
    if (!test_.spec) {
      cast_row(test_.source, test_.to)(whole_.data(), out.data(), elements);
      return out;
    }
    std::vector<std::byte> memory;
    const ConstPlaneMemory plane = quantised(0, test_.rows, memory);
    dequantize(*test_.spec, test_.plane, plane, amax_,
               {.data = out.data(),
                .dtype = test_.to,
                .rows = test_.rows,
                .columns = test_.columns,
                .row_stride = test_.columns});
    return out;
  }

 private:
  static size_t bytes(DType dtype, int64_t elements) { return static_cast<size_t>(bytes_of(dtype, elements)); }
  MatrixView view(int64_t begin, int64_t count) const {
    return {.data = whole_.data() + bytes_of(test_.source, begin * test_.columns),
            .dtype = test_.source,
            .rows = count,
            .columns = test_.columns,
            .row_stride = test_.columns};
  }
  ConstPlaneMemory quantised(int64_t begin, int64_t count, std::vector<std::byte>& memory) const {
    const PlaneShape shape = plane_shape(*test_.spec, test_.plane, count, test_.columns);
    memory.resize(static_cast<size_t>(shape.code_bytes() + shape.scale_bytes()) + 64);
    const PlaneMemory plane{.codes = memory.data(),
                            .code_stride = shape.code_row_bytes(),
                            .scales = memory.data() + shape.code_bytes(),
                            .scale_stride = shape.scale_row_bytes()};
    quantize(view(begin, count), *test_.spec, {.row = amax_, .column = amax_},
             test_.plane == Plane::kRow ? Planes{.row = plane, .column = {}} : Planes{.row = {}, .column = plane}, {},
             {.first_row = begin, .rows = test_.rows, .columns = test_.columns});
    return {.codes = plane.codes,
            .code_stride = plane.code_stride,
            .scales = plane.scales,
            .scale_stride = plane.scale_stride};
  }
  void publish(int64_t begin, int64_t count) {
    PublishedRows rows{.begin = begin, .count = count};
    if (count > 0 && test_.spec) {
      rows.plane = quantised(begin, count, memories_.emplace_back());
    } else if (count > 0) {
      rows.data = static_cast<const std::byte*>(view(begin, count).data);
    }
    published_->owners.push_back(rows);
  }

  const Case test_;
  std::vector<std::byte> whole_;
  float amax_ = 0;
  std::list<std::vector<std::byte>> memories_;
  std::shared_ptr<PublishedWeight> published_;
};

// A destination whose bytes around and between the rows must stay.
class Gathered {
 public:
  explicit Gathered(const Case& test)
      : test_(test), memory_(static_cast<size_t>(bytes_of(test.to, test.rows * (test.columns + test.gap)))) {
    std::fill_n(memory_.data(), memory_.size(), std::byte{0x5a});
  }
  MatrixMemory to() {
    return {.data = memory_.data(),
            .dtype = test_.to,
            .rows = test_.rows,
            .columns = test_.columns,
            .row_stride = test_.columns + test_.gap};
  }
  void expect(const std::vector<std::byte>& expected) {
    const auto row = static_cast<size_t>(bytes_of(test_.to, test_.columns));
    const auto gap = static_cast<size_t>(bytes_of(test_.to, test_.gap));
    for (size_t r = 0; r < static_cast<size_t>(test_.rows); ++r) {
      const std::byte* const line = memory_.data() + r * (row + gap);
      ASSERT_EQ(std::memcmp(line, expected.data() + r * row, row), 0) << test_.text() << " row " << r;
      ASSERT_TRUE(std::all_of(line + row, line + row + gap, [](std::byte b) { return b == std::byte{0x5a}; }));
    }
    EXPECT_TRUE(memory_.intact()) << test_.text();
  }

 private:
  const Case test_;
  GuardedBytes memory_;
};

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const int64_t rows : {1, 2, 17, 56, 63, 65, 120, 131, 300}) {
    for (const int64_t gap : {0, 3}) {
      for (const auto& [from, to] : {std::pair{DType::kF32, DType::kF32}, std::pair{DType::kBF16, DType::kBF16},
                                     std::pair{DType::kF32, DType::kBF16}, std::pair{DType::kF16, DType::kF32}})
        cases.push_back({.source = from, .to = to, .rows = rows, .columns = 33, .alignment = 16, .gap = gap});
    }
    for (const Format format : all_formats()) {
      for (const Plane plane : {Plane::kRow, Plane::kColumn}) {
        for (const NvScaling scaling : {NvScaling::k16x16, NvScaling::k1x16}) {
          if (scaling == NvScaling::k1x16 && format != Format::kNvfp4) continue;
          if (format == Format::kNvfp4 && plane == Plane::kColumn && rows % 2 != 0) continue;  // codes are pairs
          const int64_t alignment = std::max<int64_t>(block_shape({.format = format}, plane).rows, 16);
          for (const DType to : {DType::kF32, DType::kBF16})
            cases.push_back({.spec = QuantSpec{.format = format, .scaling = scaling},
                             .plane = plane,
                             .to = to,
                             .rows = rows,
                             .columns = 160,
                             .alignment = alignment,
                             .gap = rows % 3});
        }
      }
    }
  }
  // Larger than the second-level cache, and than a band.
  cases.push_back({.rows = 3001, .columns = 1024, .alignment = 16});
  cases.push_back(
      {.source = DType::kF32, .to = DType::kBF16, .rows = 3001, .columns = 2048, .alignment = 16, .gap = 1});
  cases.push_back({.spec = QuantSpec{.format = Format::kNvfp4},
                   .to = DType::kBF16,
                   .rows = 2046,
                   .columns = 1024,
                   .alignment = 16});
  return cases;
}

class Gathers : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Gathers, testing::Values(1, 2, 3, 4));

TEST_P(Gathers, GiveTheWholeMatrix) {
  const int ranks = GetParam();
  const std::vector<Case> cases = all_cases();
  std::vector<std::unique_ptr<Weight>> weights;
  for (const Case& test : cases) weights.push_back(std::make_unique<Weight>(test, ranks, weights.size()));
  run_ranks_well({.size = ranks, .slots = static_cast<uint32_t>(cases.size())}, [&](Group& group) {
    const auto stream = group.device().make_stream({.name = "gather"});
    for (const uint64_t version : {3, 4}) {
      for (size_t i = 0; i < cases.size(); ++i) {
        Gathered gathered(cases[i]);
        const auto slot = static_cast<uint32_t>(i);
        const GatherPart part{
            .slot = slot, .version = version, .from = weights[i]->published(), .to = gathered.to(), .weight = "w"};
        gather(group, *stream, {&part, 1}, version == 4);  // together
        group.set(Word::kPublished, slot, version);        // after it was asked for: it waits
        stream->synchronize(group.deadline());
        gathered.expect(weights[i]->expected());
      }
      group.barrier("read");
    }
  });
}

TEST_P(Gathers, TakeListsAsOneOperation) {
  const int ranks = GetParam();
  const Case small{.source = DType::kBF16, .to = DType::kBF16, .rows = 28, .columns = 8, .alignment = 4};
  const Case empty_on_most{.rows = 1, .columns = 40, .alignment = 16};
  std::vector<std::unique_ptr<Weight>> weights;
  for (uint64_t i = 0; i < 20; ++i)
    weights.push_back(std::make_unique<Weight>(i % 3 == 0 ? empty_on_most : small, ranks, i));
  run_ranks_well({.size = ranks}, [&](Group& group) {
    const auto stream = group.device().make_stream({.name = "gather"});
    std::list<Gathered> gathered;
    std::vector<GatherPart> parts;
    for (uint32_t i = 0; i < weights.size(); ++i) {
      gathered.emplace_back(i % 3 == 0 ? empty_on_most : small);
      parts.push_back(
          {.slot = i, .version = 1, .from = weights[i]->published(), .to = gathered.back().to(), .weight = "w"});
    }
    EXPECT_EQ(gather_operations(group, parts).size(), static_cast<size_t>(group.size()));
    EXPECT_EQ(gather_operations(group, parts, true).size(), 1U);
    gather(group, *stream, parts);
    for (uint32_t i = 0; i < weights.size(); ++i) group.set(Word::kPublished, i, 1);
    stream->synchronize(group.deadline());
    size_t i = 0;
    for (Gathered& each : gathered) each.expect(weights[i++]->expected());
    gather(group, *stream, std::span<const GatherPart>());
  });
}

// Nobody has to take part: ranks gather in different orders, or not at all.
TEST(Gather, NeedsNoCommonOrder) {
  const Case test{.rows = 30, .columns = 30, .alignment = 2};
  std::vector<std::unique_ptr<Weight>> weights;
  for (uint64_t i = 0; i < 10; ++i) weights.push_back(std::make_unique<Weight>(test, 3, i));
  run_ranks_well({.size = 3}, [&](Group& group) {
    const auto stream = group.device().make_stream({.name = "gather"});
    for (uint32_t i = 0; i < 10; ++i) group.set(Word::kPublished, i, 1);
    std::vector<uint32_t> order(10);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(static_cast<uint32_t>(group.rank())));
    order.resize(static_cast<size_t>(3 * group.rank()));
    for (const uint32_t i : order) {
      Gathered gathered(test);
      const GatherPart part{
          .slot = i, .version = 1, .from = weights[i]->published(), .to = gathered.to(), .weight = "w"};
      gather(group, *stream, {&part, 1});
      stream->synchronize(group.deadline());
      gathered.expect(weights[i]->expected());
    }
  });
}

TEST(Gather, TogetherItWaitsForAllOwnersAndNamesTheFirstThatIsLate) {
  const Case test{.rows = 12, .columns = 8, .alignment = 4};
  const Weight weight(test, 3, 1);
  run_ranks_well({.size = 3}, [&](Group& group) {
    Gathered gathered(test);
    const GatherPart part{.slot = 0, .version = 1, .from = weight.published(), .to = gathered.to(), .weight = "w"};
    const auto operations = gather_operations(group, {&part, 1}, true);
    ASSERT_EQ(operations.size(), 1U);
    const device::Condition& published = *operations.front()->after.front();
    if (group.rank() == 0) group.set(Word::kPublished, 0, 1);
    group.barrier("the first one");
    if (group.rank() == 0) {
      EXPECT_FALSE(published.met());
      EXPECT_EQ(published.to_string(), "rank 1 to publish version 1 of w");
    }
    group.barrier("seen");
    if (group.rank() != 0) group.set(Word::kPublished, 0, 1);
    group.barrier("all of them");
    EXPECT_TRUE(published.met());
    device::WaitNotes notes;
    published.note(notes);
    EXPECT_EQ(notes.edges.size(), 3U);
  });
}

TEST(Gather, TogetherItDeclaresOneWriteOfEachMatrixThatHasRows) {
  const Case test{.rows = 12, .columns = 8, .alignment = 4, .gap = 3};
  const Case empty{.rows = 0, .columns = 8};
  const Weight weight(test, 3, 1), nothing(empty, 3, 2);
  run_ranks_well({.size = 3}, [&](Group& group) {
    Gathered gathered(test), none(empty);
    const std::array<GatherPart, 2> parts{
        GatherPart{.slot = 0, .version = 1, .from = nothing.published(), .to = none.to(), .weight = "nothing"},
        GatherPart{.slot = 1, .version = 1, .from = weight.published(), .to = gathered.to(), .weight = "w"}};
    const auto operations = gather_operations(group, parts, true);
    ASSERT_EQ(operations.size(), 1U);
    std::vector<device::Access> writes;
    std::ranges::copy_if(operations.front()->accesses, std::back_inserter(writes), &device::Access::write);
    ASSERT_EQ(writes.size(), 1U);
    EXPECT_EQ(writes[0].data, gathered.to().data);
    EXPECT_EQ(writes[0].bytes, (11U * 11 + 8) * 4);
    EXPECT_EQ(operations.front()->accesses.size(), 1U + 3);
  });
}

TEST(Gather, CountsTheBytesThatTravel) {
  const Case cast{.source = DType::kBF16, .to = DType::kF32, .rows = 64, .columns = 32, .alignment = 32};
  Case quantised = cast;
  quantised.spec = QuantSpec{.format = Format::kMxfp8};
  const Weight plain(cast, 2, 1), codes(quantised, 2, 2);
  run_ranks_well({.size = 2}, [&](Group& group) {
    Gathered gathered(cast);
    const auto bytes = [&](const Weight& weight) {
      const GatherPart part{.slot = 0, .version = 1, .from = weight.published(), .to = gathered.to(), .weight = "w"};
      return gather_operations(group, {&part, 1}, true).front()->bytes;
    };
    EXPECT_EQ(bytes(plain), 64 * 32 * 2);
    EXPECT_EQ(bytes(codes), 64 * 32 + 64);  // a scale for 32 elements
  });
}

TEST(Gather, RefusesANewerVersion) {
  const Case test{.rows = 8, .columns = 8, .alignment = 4};
  const Weight weight(test, 2, 1);
  run_ranks_well({.size = 2}, [&](Group& group) {
    const auto stream = group.device().make_stream({.name = "gather"});
    group.set(Word::kPublished, 0, group.rank() == 1 ? 6 : 5);
    group.barrier("published");
    Gathered gathered(test);
    const GatherPart part{
        .slot = 0, .version = 5, .from = weight.published(), .to = gathered.to(), .weight = "wte.weight"};
    gather(group, *stream, {&part, 1});
    EXPECT_THAT(error_of([&] { stream->synchronize(group.deadline()); }),
                AllOf(HasSubstr("mismatch"), HasSubstr("rank 1"), HasSubstr("version 6 of wte.weight"),
                      HasSubstr("version 5")));
    group.barrier("seen");
  });
}

// The version may be one that its owner updates: for operations that are captured once.
TEST(Gather, ReadsItsVersionWhenItRuns) {
  const Case test{.rows = 8, .columns = 8, .alignment = 4};
  const Weight weight(test, 2, 1);
  run_ranks_well({.size = 2}, [&](Group& group) {
    const auto stream = group.device().make_stream({.name = "gather"});
    uint64_t version = 0;
    Gathered gathered(test);
    const GatherPart part{
        .slot = 0, .version_now = &version, .from = weight.published(), .to = gathered.to(), .weight = "w"};
    const auto operations = gather_operations(group, {&part, 1});
    for (version = 1; version < 20; ++version) {
      group.set(Word::kPublished, 0, version);
      for (const auto& operation : operations) stream->enqueue(operation);
      stream->synchronize(group.deadline());
      gathered.expect(weight.expected());
      group.barrier("retired");
    }
  });
}

TEST(Gather, ChecksItsParts) {
  PublishedWeight weight{.rows = 4, .columns = 2, .owners = {{.begin = 0, .count = 4}}};
  EXPECT_THAT(error_of([&] { check_published(weight, 1, "w"); }), HasSubstr("lie nowhere"));
  std::byte memory[64];
  weight.owners[0].data = memory;
  EXPECT_THAT(error_of([&] { check_published(weight, 2, "w"); }), HasSubstr("2 ranks"));
  weight.spec = QuantSpec{.format = Format::kNvfp4};
  weight.owners[0].plane = {.codes = memory, .scales = memory};
  EXPECT_THAT(error_of([&] { check_published(weight, 1, "w"); }), HasSubstr("needs an amax"));
  weight.spec.reset();
  check_published(weight, 1, "w");
  run_ranks_well({.size = 1}, [&](Group& group) {
    float to[8];
    GatherPart part{.from = std::make_shared<PublishedWeight>(weight),
                    .to = {.data = to, .rows = 3, .columns = 2, .row_stride = 2},
                    .weight = "w"};
    EXPECT_THAT(error_of([&] { gather(group, *group.device().caller(), {&part, 1}); }), HasSubstr("[4, 2] to [3, 2]"));
    part.to.rows = 4;
    part.to.dtype = DType::kI32;
    EXPECT_THAT(error_of([&] { gather(group, *group.device().caller(), {&part, 1}); }),
                HasSubstr("f32 cannot be cast to i32"));
    part.from = nullptr;
    EXPECT_THAT(error_of([&] { gather(group, *group.device().caller(), {&part, 1}); }), HasSubstr("by 0 ranks"));
  });
}

}  // namespace
}  // namespace tessera::collective
