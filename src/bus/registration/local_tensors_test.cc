#include "bus/registration/local_tensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/testing.h"

namespace tessera::bus {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

const Identity kRank{.name_space = "default", .job = "inference", .rank = 0, .world = 2};

// Rank 0's tensors, all replicated, in one buffer of floats.
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

// Listing their 2^29 elements would take more memory than there is.
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
  EXPECT_THAT(error_of({far}), HasSubstr("up to 2, but the job has 2 ranks, 0 to 1: choose a mesh of those"));
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

TensorSpec planes_spec(Format format, const Shape& shape, const std::string& layout, PlaneSet planes) {
  static std::vector<std::byte> memory(size_t{1} << 20);
  return {.name = "w",
          .data = memory.data(),
          .shape = shape,
          .layout = Layout::parse(layout),
          .wire = format,
          .planes = planes};
}

std::string registering(const TensorSpec& spec) {
  return error_of([&] { manifest_of(kRank, std::span(&spec, 1)); });
}

TEST(ManifestOf, EdgesOfShardsInsideBlocksOfPlanesAreErrorsThatNameTheNearestOnes) {
  constexpr PlaneSet kRow{.row = true}, kColumn{.column = true}, kBoth{.row = true, .column = true};
  const auto check = [](Format format, const Shape& shape, const std::string& layout, PlaneSet planes) {
    return registering(planes_spec(format, shape, layout, planes));
  };
  EXPECT_THAT(check(Format::kNvfp4, {40, 64}, "2:S0", kRow),
              HasSubstr("tensor w of inference/0: layout 2:S0 cuts dim 0 of shape 40x64 at 20, inside a block of 16 x "
                        "16 of its row plane in nvfp4: the nearest edges between blocks are 16 and 32: choose a mesh "
                        "or bounds (G0[0;...])"));
  EXPECT_THAT(check(Format::kNvfp4, {36, 64}, "2:G0[0;34;36]", kRow), HasSubstr("edges between blocks are 32 and 36"));
  // An edge on another rank is this rank's error, too.
  EXPECT_THAT(check(Format::kMxfp8, {8, 80}, "2:G1[0;0;80]", kRow), "(no error)");
  EXPECT_THAT(check(Format::kMxfp8, {8, 80}, "2:S1", kRow),
              HasSubstr("dim 1 of shape 8x80 at 40, inside a block of 1"));
  EXPECT_EQ(check(Format::kMxfp8, {3, 8, 80}, "2:S2", kColumn), "(no error)");
  EXPECT_THAT(check(Format::kMxfp8, {3, 8, 80}, "2:S1", kColumn), HasSubstr("32 x 1 of its column plane in mxfp8"));
  EXPECT_THAT(check(Format::kFp8Block128x128, {256, 256}, "2:S0*2", kBoth), HasSubstr("dim 0 of shape 256x256 at 64"));
  EXPECT_EQ(check(Format::kFp8Block128x128, {256, 256}, "2:S0", kBoth), "(no error)");
  EXPECT_EQ(check(Format::kFp8E4M3, {7, 9}, "2:S0", kBoth), "(no error)");
  EXPECT_EQ(check(Format::kNvfp4, {3, 40, 64}, "2:S0", kBoth), "(no error)");
}

TEST(ManifestOf, PlanesGoWithAFormatAMatrixAndNoStrides) {
  const auto error = [](const auto& change) {
    TensorSpec spec = planes_spec(Format::kNvfp4, {32, 64}, "2:R", {.row = true, .column = true});
    change(spec);
    return registering(spec);
  };
  EXPECT_EQ(error([](TensorSpec&) {}), "(no error)");
  EXPECT_THAT(error([](TensorSpec& spec) { spec.wire.reset(); }),
              HasSubstr("its planes (row and column) have no format"));
  EXPECT_THAT(error([](TensorSpec& spec) { spec.shape = {64}; }), HasSubstr("shape 64 is not that of a matrix"));
  EXPECT_THAT(error([](TensorSpec& spec) { spec.strides = {64, 1}; }), HasSubstr("it has strides"));
  EXPECT_THAT(error([](TensorSpec& spec) { spec.shape = {32, 63}; }), HasSubstr("packs pairs along its columns"));
  EXPECT_THAT(error([](TensorSpec& spec) { spec.shape = {31, 64}; }), HasSubstr("packs pairs along its rows"));
  EXPECT_THAT(error([](TensorSpec& spec) { spec.data = nullptr; }), HasSubstr("gave no memory"));
}

// Each registered part once, whatever travels.
TEST(LocalTensors, ReceivedIntoPlanesLieInTheBlockOfThese) {
  const auto found = [](Format format) {
    const std::vector<TensorSpec> specs{planes_spec(format, {64, 128}, "2:S0", {.row = true, .column = true})};
    const Manifest sender{{{.name = "w", .shape = {64, 128}, .layout = Layout::parse("1:R")}}};
    const Match matched = match(sender, "trainer", manifest_of(kRank, specs), "inference");
    return std::pair(registered_tensors(manifest_of(kRank, specs), specs, 0).front(),
                     local_tensors(matched, specs, 0, false));
  };
  const auto& [nv_block, nv] = found(Format::kNvfp4);
  ASSERT_EQ(nv.size(), 1u);
  EXPECT_EQ(nv[0].planes.size(), 2u);
  EXPECT_EQ(nv[0].data, nv_block.data);
  EXPECT_EQ(nv[0].extent().end, nv_block.extent().end);
  const auto& [mx_block, mx] = found(Format::kMxfp8);
  ASSERT_EQ(mx.size(), 2u);
  EXPECT_THAT(mx[1].name, "w (column plane)");
  EXPECT_EQ(mx[0].data + mx[0].extent().end, mx[1].data);
  EXPECT_EQ(mx[1].data + mx[1].extent().end, mx_block.data + mx_block.extent().end);
  EXPECT_THAT(mx[0].held.extents(), ElementsAre(32, 128));
  EXPECT_THAT(mx[1].held.extents(), ElementsAre(128, 32));
  EXPECT_THAT(find_ties(mx), ElementsAre(0, 1));
}

TEST(LocalTensors, SentFromPlanesTakeThePlaneThatTravels) {
  const auto found = [](Format format, PlaneSet offered, PlaneSet taken, const char* layout = "2:S1") {
    const std::vector<TensorSpec> specs{planes_spec(format, {3, 64, 128}, layout, offered)};
    ManifestEntry entry{.name = "w", .shape = {3, 64, 128}, .layout = Layout::parse("1:R"), .wire = format};
    entry.planes = taken;
    const Match matched = match(manifest_of(kRank, specs), "trainer", {{entry}}, "inference");
    return local_tensors(matched, specs, 0, true);
  };
  constexpr PlaneSet kRow{.row = true}, kColumn{.column = true}, kBoth{.row = true, .column = true};
  const auto* block = static_cast<const std::byte*>(planes_spec(Format::kNvfp4, {16, 16}, "1:R", kRow).data);
  const auto nv = found(Format::kNvfp4, kBoth, kBoth);
  const QuantizedLayout nv_layout = quantized_layout({.format = Format::kNvfp4}, kBoth, 3, 32, 128);
  ASSERT_EQ(nv.size(), 1u);
  ASSERT_TRUE(nv[0].encoded);
  EXPECT_FALSE(nv[0].encoded->transposed);
  EXPECT_THAT(nv[0].encoded->held.extents(), ElementsAre(3, 32, 128));
  ASSERT_EQ(nv[0].encoded->matrices.size(), 3u);
  EXPECT_EQ(nv[0].encoded->matrices[2].codes - block, nv_layout.row->codes + 2 * 32 * 64);
  EXPECT_EQ(nv[0].encoded->matrices[2].scales - block, nv_layout.row->scales + 2 * 32 * 8);
  EXPECT_EQ(nv[0].encoded->matrices[2].amax - block, nv_layout.row->amaxes + 8);
  EXPECT_TRUE(found(Format::kNvfp4, kColumn, {})[0].encoded->transposed);

  const auto mx = found(Format::kMxfp8, kBoth, kBoth);
  const QuantizedLayout mx_layout = quantized_layout({.format = Format::kMxfp8}, kBoth, 3, 32, 128);
  ASSERT_EQ(mx.size(), 2u);
  EXPECT_FALSE(mx[0].encoded->transposed);
  EXPECT_TRUE(mx[1].encoded->transposed);
  EXPECT_THAT(mx[1].encoded->held.extents(), ElementsAre(3, 128, 32));
  EXPECT_EQ(mx[1].encoded->matrices[1].codes - block, mx_layout.column->codes + 32 * 128);
  EXPECT_EQ(mx[1].encoded->matrices[1].amax, nullptr);
  EXPECT_FALSE(found(Format::kFp8Block1x128, kColumn, kColumn, "2:S2")[0].encoded->transposed);
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

// Of a 6x4 tensor sharded in columns over ranks 0 and 1: row 3, and columns 1 to 3 of every second row.
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
