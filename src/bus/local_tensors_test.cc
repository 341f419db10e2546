#include "bus/local_tensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/testing.h"

namespace tessera::bus {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

const Identity kRank{.name_space = "default", .job = "inference", .rank = 0, .world = 2};

// Rank 0's tensors, all of them replicated, in one buffer of floats.
class Tensors {
 public:
  Tensors& add(const std::string& name, size_t offset, const Shape& shape, std::vector<Index> strides = {}) {
    specs_.push_back({.name = name,
                      .data = memory_.data() + offset,
                      .dtype = DType::kF32,
                      .shape = shape,
                      .layout = {},
                      .strides = std::move(strides)});
    return *this;
  }
  std::vector<uint32_t> ties() const {
    return find_ties(registered_tensors(manifest_of(kRank, specs_), specs_, kRank.rank));
  }
  std::string error() const {
    return error_of([&] { ties(); });
  }

 private:
  std::vector<float> memory_ = std::vector<float>(4096);
  std::vector<TensorSpec> specs_;
};

TEST(Ties, TensorsApartAreOnTheirOwn) {
  EXPECT_THAT(Tensors().add("a", 0, {4, 4}).add("b", 16, {4, 4}).ties(), ElementsAre(0, 1));
}

TEST(Ties, TheSamePlaceTwiceIsOneTensor) {
  EXPECT_THAT(Tensors().add("a", 32, {4, 4}).add("b", 0, {4, 4}).add("c", 32, {4, 4}).ties(), ElementsAre(0, 1, 0));
}

TEST(Ties, ColumnsOfAFusedMatrixInterleaveWithoutMeeting) {
  EXPECT_THAT(Tensors().add("q", 0, {8, 2}, {4, 1}).add("k", 2, {8, 2}, {4, 1}).ties(), ElementsAre(0, 1));
}

LocalTensor weight(const std::string& name, size_t offset, const Shape& shape, const std::vector<Index>& strides) {
  return {.name = name,
          .dtype = DType::kBF16,
          .array = {Region::full(shape), byte_strides(DType::kBF16, shape, strides)},
          .data = reinterpret_cast<std::byte*>(uintptr_t{1} << 32) + offset};  // never touched
}

// As elements they would be 2^29; their memory would not hold that many.
TEST(Ties, LargeViewsThatInterleaveAreComparedByTheirPattern) {
  constexpr Index n = Index{1} << 14;
  const Shape shape{n, n};
  const std::vector<LocalTensor> halves{weight("q", 0, shape, {1, 2 * n}), weight("k", 2 * n, shape, {1, 2 * n})};
  EXPECT_THAT(find_ties(halves), ElementsAre(0, 1));
  const std::vector<LocalTensor> alternating{weight("even", 0, shape, {2 * n, 2}), weight("odd", 2, shape, {2 * n, 2})};
  EXPECT_THAT(find_ties(alternating), ElementsAre(0, 1));
  const std::vector<LocalTensor> meeting{weight("q", 0, shape, {1, 2 * n}), weight("k", 2 * n - 2, shape, {1, 2 * n})};
  EXPECT_THAT(error_of([&] { find_ties(meeting); }), HasSubstr("tensors q and k overlap"));
  const std::vector<LocalTensor> tangled{weight("q", 0, shape, {2 * n, 2}), weight("k", 2, shape, {2 * n + 2, 2})};
  EXPECT_THAT(error_of([&] { find_ties(tangled); }), HasSubstr("pieces"));
}

TEST(Ties, AnOverlapIsRefusedByName) {
  EXPECT_THAT(Tensors().add("a", 0, {4, 4}).add("b", 15, {4, 4}).error(), HasSubstr("tensors a and b overlap"));
  EXPECT_THAT(Tensors().add("q", 0, {8, 3}, {4, 1}).add("k", 2, {8, 2}, {4, 1}).error(), HasSubstr("overlap"));
}

TEST(Ties, ATensorThatWritesAnElementTwiceIsRefused) {
  EXPECT_THAT(Tensors().add("expanded", 0, {4, 4}, {0, 1}).error(), HasSubstr("expanded"));
  EXPECT_THAT(Tensors().add("sliding", 0, {4, 4}, {2, 1}).error(), HasSubstr("sliding"));
  EXPECT_THAT(Tensors().add("transposed", 0, {4, 4}, {1, 4}).error(), "(no error)");
}

TEST(ManifestOf, MissingMemoryBadRanksAndRepeatedNamesAreNamed) {
  const auto error_of = [](const std::vector<TensorSpec>& specs) -> std::string {
    try {
      manifest_of(kRank, specs);
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  float value = 0;
  const TensorSpec good{.name = "a", .data = &value, .dtype = DType::kF32, .shape = {}, .layout = {}, .strides = {}};
  EXPECT_EQ(error_of({good}), "no error");
  EXPECT_THAT(error_of({good, good}), HasSubstr("tensor a of inference/0: registered twice"));
  TensorSpec empty = good;
  empty.data = nullptr;
  EXPECT_THAT(error_of({empty}), HasSubstr("gave no memory"));
  TensorSpec far = good;
  far.layout = Layout::parse("3:R");
  EXPECT_THAT(error_of({far}), HasSubstr("names rank 2, the job has 2"));
  TensorSpec outside = empty;
  outside.layout = Layout::parse("1@1:R");
  EXPECT_EQ(error_of({outside}), "no error");
}

TEST(ManifestOf, AWireFormatIsAskedForWhereItCanBe) {
  std::vector<float> memory(24);
  std::vector<TensorSpec> specs;
  for (const auto& [name, dtype, shape] : {std::tuple{"weight", DType::kF32, Shape{4, 6}},
                                           {"norm", DType::kF32, Shape{6}},
                                           {"ids", DType::kI32, Shape{4, 6}}})
    specs.push_back({.name = name, .data = memory.data(), .dtype = dtype, .shape = shape, .wire = Format::kMxfp8});
  const Manifest manifest = manifest_of(kRank, specs);
  EXPECT_EQ(manifest.entries[0].wire, Format::kMxfp8);
  EXPECT_EQ(manifest.entries[1].wire, std::nullopt);
  EXPECT_EQ(manifest.entries[2].wire, std::nullopt);
}

TEST(ManifestOf, ATensorWithoutALayoutHasThePairsOrIsReplicated) {
  std::vector<float> values(4);
  const Shape shape{4};
  const TensorSpec bare{
      .name = "a", .data = values.data(), .dtype = DType::kF32, .shape = {4}, .layout = {}, .strides = {}};
  TensorSpec own = bare;
  own.name = "b";
  own.layout = Layout::parse("1@0:S0");
  const std::vector<TensorSpec> specs{bare, own};
  EXPECT_EQ(manifest_of(kRank, specs).entries[0].layout, Layout::parse("2:R").bind(shape));
  const Manifest manifest = manifest_of(kRank, specs, Layout::parse("2:S0"));
  EXPECT_EQ(manifest.entries[0].layout, Layout::parse("2:S0").bind(shape));
  EXPECT_EQ(manifest.entries[1].layout, Layout::parse("1@0:S0").bind(shape));
}

// Of 6x4 in columns, over ranks 0 and 1: row 3, and columns 1 to 3 of every second row.
TEST(LocalTensors, OfASliceAreViewsOfWhatIsRegistered) {
  std::vector<float> memory(12);
  const std::vector<TensorSpec> specs{
      {.name = "w", .data = memory.data(), .shape = {6, 4}, .layout = Layout::parse("2:S1"), .strides = {}}};
  const Manifest sender = manifest_of(kRank, specs);
  Manifest receiver;
  receiver.entries.push_back({.name = "row",
                              .shape = {4},
                              .layout = Layout::parse("1:R"),
                              .source = {.name = "w", .slices = {{3, 4, 1, true}, {0, 4}}}});
  receiver.entries.push_back({.name = "part",
                              .shape = {3, 2},
                              .layout = Layout::parse("1:R"),
                              .source = {.name = "w", .slices = {{0, 6, 2}, {1, 3}}}});
  const Match matched = match(sender, "trainer", receiver, "inference");
  const std::vector<LocalTensor> found = local_tensors(matched, specs, 0, true);
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].data, reinterpret_cast<std::byte*>(&memory[3 * 2]));
  EXPECT_THAT(found[0].array.owned.extents(), ElementsAre(2));
  EXPECT_THAT(found[0].array.strides, ElementsAre(4));
  EXPECT_EQ(found[1].data, reinterpret_cast<std::byte*>(&memory[1]));
  EXPECT_THAT(found[1].array.owned.extents(), ElementsAre(3, 1));
  EXPECT_THAT(found[1].array.strides, ElementsAre(16, 4));
}

}  // namespace
}  // namespace tessera::bus
