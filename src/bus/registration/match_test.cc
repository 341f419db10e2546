#include "bus/registration/match.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bus/registration/manifest_testing.h"

namespace tessera::bus {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

// The diffs that ranks 1, 2, ... would publish against rank 0.
std::vector<ManifestDiff> diffs(const Manifest& rank0, const std::vector<Manifest>& others) {
  std::vector<ManifestDiff> all(1);
  for (const Manifest& other : others) all.push_back(ManifestDiff::between(rank0, other));
  return all;
}

Manifest merged(const std::string& job, const Manifest& rank0, std::span<const ManifestDiff> diffs) {
  return *merge(job, std::make_shared<const Manifest>(rank0), diffs);
}

std::string mismatch_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kMismatch);
    return error.what();
  }
  return "no error";
}

TEST(MatchTest, ANameThatIsNotOfferedIsAnsweredWithTheNearestOnes) {
  const Manifest sender{{{"model.embed.weight", DType::kF32, {4}, Layout::parse("1:R")},
                         {"model.norm.weight", DType::kF32, {4}, Layout::parse("1:R")}}};
  const Manifest receiver{{{"embed.weight", DType::kF32, {4}, Layout::parse("1:R")},
                           {"model.norm.wieght", DType::kF32, {4}, Layout::parse("1:R")},
                           {"rope", DType::kF32, {4}, Layout::parse("1:R")}}};
  const std::string error = mismatch_of([&] { match(sender, "trainer", receiver, "inference"); });
  EXPECT_THAT(error, HasSubstr("tensor embed.weight: trainer does not offer it; did you mean model.embed.weight?"));
  EXPECT_THAT(error, HasSubstr("tensor model.norm.wieght: trainer does not offer it; did you mean model.norm.weight?"));
  EXPECT_THAT(error, testing::EndsWith("tensor rope: trainer does not offer it"));
}

TEST(Merge, EqualRanksGiveRankZerosList) {
  const Manifest manifest{{entry("a", {4, 6}, "2:S0"), entry("b", {8}, "2:R")}};
  const auto none = diffs(manifest, {manifest});
  EXPECT_TRUE(none[1].empty());
  EXPECT_EQ(names(merged("trainer", manifest, none)), names(manifest));
}

TEST(Merge, EqualRanksShareRankZerosManifest) {
  const auto rank0 = std::make_shared<const Manifest>(Manifest{{entry("a", {4, 6}, "2:S0")}});
  const std::vector<ManifestDiff> none(2);
  EXPECT_EQ(merge("trainer", rank0, none), rank0);
  EXPECT_THAT(mismatch_of([&] { merge("trainer", rank0, std::span(none).first(1)); }),
              HasSubstr("tensor a: trainer/0 lays it out over rank 1, but the job has 1"));
}

TEST(Merge, StagesOfAPipelineAddUp) {
  const Manifest first{{entry("layer0", {4}, "1@0:R")}};
  const Manifest second{{entry("layer1", {4}, "1@1:R")}};
  const Manifest both = merged("trainer", first, diffs(first, {second}));
  EXPECT_EQ(names(both), (std::vector<std::string>{"layer0", "layer1"}));
}

TEST(Merge, DisjointMeshesOfOneNameAreReplicas) {
  const Manifest even{{entry("norm", {8}, "2@0,2:S0")}};
  const Manifest odd{{entry("norm", {8}, "2@1,3:S0")}};
  const Manifest both = merged("trainer", even, diffs(even, {odd, even, odd}));
  ASSERT_EQ(both.entries.size(), 1u);
  EXPECT_EQ(both.entries[0].layout.to_string(), "replica=2,2@0,2,1,3:R,S0");
}

TEST(Merge, EveryDisagreementIsNamed) {
  const Manifest rank0{{entry("a", {4, 6}, "2:S0"), entry("b", {8}, "2:R"), entry("c", {8}, "2:R")}};
  const Manifest rank1{{entry("a", {4, 5}, "2:S0"), entry("b", {8}, "2:R", DType::kBF16)}};
  const std::string text = mismatch_of([&] { merged("trainer", rank0, diffs(rank0, {rank1})); });
  EXPECT_THAT(text, AllOf(HasSubstr("tensor a: trainer/1 has shape 4x5, trainer/0 has 4x6"),
                          HasSubstr("tensor b: trainer/1 has dtype bf16, trainer/0 has f32"),
                          HasSubstr("tensor c: trainer/1 is in its mesh (2:R) but does not register it")));
}

TEST(Merge, RanksThatAskForDifferentWireFormatsDisagree) {
  const ManifestEntry w = entry("w", {4, 6}, "3:S0");
  const Manifest rank0{{quantised(w, Format::kNvfp4)}};
  const std::string text =
      mismatch_of([&] { merged("trainer", rank0, diffs(rank0, {{{quantised(w, Format::kMxfp8)}}, {{w}}})); });
  EXPECT_THAT(text, AllOf(HasSubstr("tensor w: trainer/1 asks for wire format mxfp8, trainer/0 for nvfp4"),
                          HasSubstr("tensor w: trainer/2 asks for wire format none, trainer/0 for nvfp4")));
  const Manifest both = merged("trainer", rank0, diffs(rank0, {rank0, rank0}));
  EXPECT_EQ(both.entries.front().wire, Format::kNvfp4);
}

TEST(Merge, OverlappingMeshesAreNoReplicas) {
  const Manifest rank0{{entry("a", {4}, "2@0-1:R")}};
  const Manifest rank2{{entry("a", {4}, "2@1-2:R")}};
  const std::string text = mismatch_of([&] { merged("trainer", rank0, diffs(rank0, {rank0, rank2})); });
  EXPECT_THAT(text, HasSubstr("tensor a: trainer/2 has layout 2@1-2:R, trainer/0 has 2:R"));
}

TEST(Match, TakesTheSendersOrderAndCountsWhatIsSkipped) {
  const Manifest sender{{entry("z", {4}, "2:S0"), entry("y", {4}, "2:S0"), entry("x", {4}, "2:S0")}};
  const Manifest receiver{{entry("x", {4}, "1:R", DType::kBF16), entry("z", {4}, "1:R")}};
  const Match matched = match(sender, "trainer", receiver, "inference");
  ASSERT_EQ(matched.tensors.size(), 2u);
  EXPECT_EQ(matched.tensors[0].name, "z");
  EXPECT_EQ(matched.tensors[1].dst_dtype, DType::kBF16);
  EXPECT_EQ(matched.skipped, 1);
}

TEST(Match, EveryMismatchIsReportedAtOnce) {
  const Manifest sender{{entry("a", {4}, "2:S0"), entry("b", {4}, "2:R", DType::kI64), entry("c", {4}, "2:R")}};
  const Manifest receiver{
      {entry("a", {5}, "1:R"), entry("b", {4}, "1:R"), entry("c", {4}, "1:Psum"), entry("d", {4}, "1:R")}};
  const std::string text = mismatch_of([&] { match(sender, "trainer", receiver, "inference"); });
  EXPECT_THAT(text, AllOf(HasSubstr("tensor a: shape 4 in trainer, 5 in inference"),
                          HasSubstr("tensor b: dtype i64 in trainer cannot be cast to f32 in inference"),
                          HasSubstr("tensor c: inference asks for layout 1:Psum"),
                          HasSubstr("tensor d: trainer does not offer it")));
}

ManifestEntry taken(ManifestEntry entry, const std::string& source, std::vector<Slice> slices = {}) {
  entry.source = {.name = source, .slices = std::move(slices)};
  return entry;
}

TEST(Match, SeveralTensorsTakeOneSourceOrSlicesOfIt) {
  const Manifest sender{{entry("experts", {4, 6}, "2,2:S0,S1"), entry("emb", {8}, "2:S0")}};
  const Manifest receiver{{entry("emb", {8}, "1:R"), taken(entry("head", {8}, "1:R"), "emb"),
                           taken(entry("one", {6}, "1:R"), "experts", {{3, 4, 1, true}, {0, 6}}),
                           taken(entry("two", {4, 3}, "1:R"), "experts", {{0, 4}, {2, 5}})}};
  const Match matched = match(sender, "trainer", receiver, "inference");
  std::vector<std::string> found;
  for (const Match::Tensor& tensor : matched.tensors)
    found.push_back(fmt::format("{} of {}: {}", tensor.name, tensor.source, tensor.src.to_string()));
  EXPECT_THAT(found, ElementsAre("one of experts: 2@2-3:S0", "two of experts: 2,2:S0,G1[0;1;3]", "emb of emb: 2:S0",
                                 "head of emb: 2:S0"));
  EXPECT_EQ(matched.skipped, 0);
}

TEST(Match, SourcesThatCannotBeTakenAreNamed) {
  const Manifest sender{{entry("a", {8}, "2:S0*2"), entry("b", {4}, "2:R"), entry("f", {4}, "1:R", DType::kF4),
                         taken(entry("s", {4}, "1:R"), "t")}};
  const Manifest receiver{{taken(entry("v", {2}, "1:R"), "a", {{0, 2}}), taken(entry("w", {2}, "1:R"), "b", {{1, 4}}),
                           taken(entry("x", {4}, "1:R"), "b", {{1, 5}}), taken(entry("y", {4}, "1:R"), "absent"),
                           taken(entry("z", {2}, "1:R", DType::kF4), "f", {{0, 2}})}};
  const std::string text = mismatch_of([&] { match(sender, "trainer", receiver, "inference"); });
  EXPECT_THAT(
      text,
      AllOf(HasSubstr("tensor v: a [0:2] of trainer cannot be taken: slice [0:2] cuts dim 0, which 2:S0*2 shards"),
            HasSubstr("tensor w: shape 3 in b [1:4] of trainer, 2 in inference"),
            HasSubstr("tensor x: b [1:5] of trainer cannot be taken: slice [1:5]: 1:5 is not within dim 0, of 4"),
            HasSubstr("tensor y: trainer does not offer absent"),
            HasSubstr("tensor z: f [0:2] of trainer cannot be taken: a slice of f4"),
            HasSubstr("tensor s: trainer offers it and says that t fills it")));
}

// (sender, receiver) -> the format that the elements are quantised to.
TEST(Match, EitherSideAsksForAWireFormat) {
  using Wire = std::optional<Format>;
  const auto agreed = [](Wire sent, Wire received) {
    const ManifestEntry w = entry("w", {4, 6}, "1:R", DType::kBF16);
    return match({{quantised(w, sent)}}, "trainer", {{quantised(w, received)}}, "inference").tensors.front().wire;
  };
  EXPECT_EQ(agreed({}, {}), Wire());
  EXPECT_EQ(agreed(Format::kNvfp4, {}), Format::kNvfp4);
  EXPECT_EQ(agreed({}, Format::kMxfp8), Format::kMxfp8);
  EXPECT_EQ(agreed(Format::kMxfp8, Format::kMxfp8), Format::kMxfp8);
  EXPECT_THAT(mismatch_of([&] { agreed(Format::kNvfp4, Format::kMxfp8); }),
              HasSubstr("tensor w: trainer asks for wire format nvfp4, inference for mxfp8"));
}

TEST(Match, OnlyFloatsOfTwoDimsOrMoreAreQuantised) {
  const auto agreed = [](const Shape& shape, DType dtype) {
    const ManifestEntry w = quantised(entry("w", shape, "1:R", dtype), Format::kMxfp8);
    return match({{w}}, "trainer", {{w}}, "inference").tensors.front().wire.has_value();
  };
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
    EXPECT_TRUE(agreed({4, 6}, dtype) && agreed({2, 3, 4, 5}, dtype)) << to_string(dtype);
    EXPECT_FALSE(agreed({6}, dtype) || agreed({}, dtype)) << to_string(dtype);
  }
  for (const DType dtype : {DType::kI32, DType::kU8, DType::kBool, DType::kC64, DType::kF8E4M3})
    EXPECT_FALSE(agreed({4, 6}, dtype)) << to_string(dtype);
}

TEST(Match, WhatIsTakenIsWhatIsQuantised) {
  const Manifest sender{{quantised(entry("experts", {4, 6, 8}, "1:R"), Format::kNvfp4)}};
  const Manifest receiver{{taken(entry("one", {6, 8}, "1:R"), "experts", {{3, 4, 1, true}, {0, 6}, {0, 8}}),
                           taken(entry("row", {8}, "1:R"), "experts", {{3, 4, 1, true}, {2, 3, 1, true}, {0, 8}})}};
  const Match matched = match(sender, "trainer", receiver, "inference");
  EXPECT_EQ(matched.tensors[0].wire, Format::kNvfp4);
  EXPECT_EQ(matched.tensors[1].wire, std::nullopt);
}

TEST(Match, PlanesTravelOnceWhereOneIsTheOtherTransposed) {
  const auto tensors = [](Format format, PlaneSet planes) {
    ManifestEntry received = quantised(entry("w", {3, 64, 128}, "2,2:S1,S2"), format);
    received.planes = planes;
    return match({{entry("w", {3, 64, 128}, "2:S1")}}, "trainer", {{received}}, "inference").tensors;
  };
  constexpr PlaneSet kRow{.row = true}, kColumn{.column = true}, kBoth{.row = true, .column = true};
  for (const Format format : all_formats()) {
    const bool once = column_is_transposed_row({.format = format});
    for (const PlaneSet planes : {kRow, kColumn, kBoth}) {
      const auto found = tensors(format, planes);
      ASSERT_EQ(found.size(), planes == kBoth && !once ? 2u : 1u) << to_string(format);
      const Match::Tensor& last = found.back();
      const bool transposed = planes.column && !once;
      EXPECT_EQ(last.transposed, transposed);
      EXPECT_EQ(last.planes, transposed ? kColumn : planes);
      EXPECT_EQ(last.shape, (transposed ? Shape{3, 128, 64} : Shape{3, 64, 128}));
      EXPECT_EQ(last.src.to_string(), transposed ? "2:S2" : "2:S1");
      EXPECT_EQ(last.dst.to_string(), transposed ? "2,2:S2,S1" : "2,2:S1,S2");
    }
  }
}

TEST(Match, PartsOfAFusedTensorAreOneGroup) {
  const auto sent = [](const std::string& name, const Shape& shape, DType dtype = DType::kF32) {
    return quantised(entry(name, shape, "1:R", dtype), Format::kNvfp4);
  };
  const auto part = [](const std::string& name, const Shape& shape, const std::string& of, Index row) {
    ManifestEntry taken = entry(name, shape, "1:R");
    taken.fused = {.name = of, .place = {{.row = row, .column = 0}}};
    return taken;
  };
  const Manifest sender{{sent("a", {4, 6}), sent("q", {4, 6}), sent("gate", {3, 4, 6}), sent("k", {8, 6})}};
  const Manifest receiver{{entry("a", {4, 6}, "1:R"), part("q", {4, 6}, "qk", 0), part("gate", {3, 4, 6}, "w", 0),
                           part("k", {8, 6}, "qk", 4)}};
  const Match matched = match(sender, "trainer", receiver, "inference");
  const auto group = [&](size_t t) { return matched.tensors[t].group; };
  EXPECT_EQ((std::vector{group(0), group(1), group(2), group(3)}), (std::vector<uint32_t>{0, 1, 2, 1}));
  EXPECT_EQ(matched.tensors[3].fused, (FusedPart::Place{.row = 4, .column = 0}));
  EXPECT_EQ(matched.tensors[0].fused, std::nullopt);

  const auto error = [&](const ManifestEntry& other, const ManifestEntry& taken) {
    return mismatch_of(
        [&] { match({{sent("q", {4, 6}), other}}, "trainer", {{part("q", {4, 6}, "qk", 0), taken}}, "inference"); });
  };
  EXPECT_THAT(error(sent("k", {4, 6}, DType::kF64), part("k", {4, 6}, "qk", 4)),
              HasSubstr("tensors q and k are parts of qk and would be quantised as one: 4x6 f32 to nvfp4, 4x6 f64"));
  EXPECT_THAT(error(sent("k", {2, 4, 6}), part("k", {2, 4, 6}, "qk", 4)), HasSubstr("2x4x6 f32 to nvfp4"));
  EXPECT_THAT(error(entry("k", {4, 6}, "1:R"), part("k", {4, 6}, "qk", 4)), "no error");  // it is not quantised
}

TEST(Match, PlanesAreTakenOfWhatCanBeQuantised) {
  ManifestEntry planes = quantised(entry("w", {4, 6}, "1:R", DType::kF8E4M3), Format::kMxfp8);
  planes.planes = {.row = true};
  const auto error = [&](const ManifestEntry& offered) {
    return mismatch_of([&] { match({{offered}}, "trainer", {{planes}}, "inference"); });
  };
  EXPECT_THAT(error(entry("w", {4, 6}, "1:R", DType::kI32)),
              HasSubstr("tensor w: inference takes it quantised to mxfp8, and trainer offers i32 of shape 4x6"));
}

ManifestEntry encoded(Format format, PlaneSet planes, const Shape& shape = {64, 128}) {
  ManifestEntry offered = quantised(entry("w", shape, "1:R", DType::kF8E4M3), format);
  offered.planes = planes;
  return offered;
}

TEST(Match, WhatIsQuantisedAlreadyStandsForF32) {
  const auto tensors = [](const ManifestEntry& offered, const ManifestEntry& taken) {
    return match({{offered}}, "trainer", {{taken}}, "inference").tensors;
  };
  constexpr PlaneSet kRow{.row = true}, kBoth{.row = true, .column = true};
  for (const Format format : all_formats()) {
    const auto floats = tensors(encoded(format, kRow), entry("w", {64, 128}, "2:S0", DType::kF16));
    ASSERT_EQ(floats.size(), 1u);
    EXPECT_TRUE(floats[0].encoded);
    EXPECT_EQ(floats[0].src_dtype, DType::kF32);
    EXPECT_EQ(floats[0].wire, format);
    const bool once = column_is_transposed_row({.format = format});
    const auto planes = tensors(encoded(format, kBoth), encoded(format, kBoth));
    ASSERT_EQ(planes.size(), once ? 1u : 2u) << to_string(format);
    EXPECT_TRUE(planes.back().encoded);
  }
  // A part of a fused tensor, which would otherwise be quantised with the others.
  ManifestEntry part = entry("w", {64, 128}, "1:R");
  part.fused = {.name = "qk", .place = {{.row = 8, .column = 0}}};
  EXPECT_EQ(tensors(encoded(Format::kNvfp4, kRow), part)[0].fused, std::nullopt);
}

TEST(Match, PlanesAndFormatsThatTheSenderDoesNotHaveAreNamed) {
  const auto error = [&](const ManifestEntry& offered, const ManifestEntry& taken) {
    return mismatch_of([&] { match({{offered}}, "trainer", {{taken}}, "inference"); });
  };
  constexpr PlaneSet kRow{.row = true}, kColumn{.column = true};
  EXPECT_THAT(error(encoded(Format::kMxfp8, kRow), encoded(Format::kMxfp8, kColumn)),
              HasSubstr("tensor w: inference takes the column plane of it, and trainer offers its row plane only, "
                        "quantised to mxfp8 already: offer both planes, or the tensor that they were made from"));
  EXPECT_THAT(error(encoded(Format::kFp8Block1x128, kColumn), entry("w", {64, 128}, "1:R")),
              HasSubstr("inference takes the values of the row plane of it, and trainer offers its column plane only"));
  EXPECT_EQ(error(encoded(Format::kNvfp4, kRow), encoded(Format::kNvfp4, kColumn)), "no error");
  EXPECT_THAT(error(encoded(Format::kNvfp4, kRow), encoded(Format::kMxfp8, kRow)),
              HasSubstr("tensor w: trainer offers it quantised to nvfp4 already, and inference asks for mxfp8"));
  EXPECT_THAT(error(encoded(Format::kNvfp4, kRow), taken(entry("w", {32, 128}, "1:R"), "w", {{0, 32}, {0, 128}})),
              HasSubstr("a slice of what is quantised to nvfp4 already"));
  EXPECT_THAT(error(encoded(Format::kNvfp4, kRow, {64}), entry("w", {64}, "1:R")),
              HasSubstr("trainer offers planes of it, and shape 64 is not that of a matrix"));
}

TEST(Match, AnOddPackedDimIsNamed) {
  const auto matched = [](Format format) {
    const ManifestEntry w = quantised(entry("w", {2, 4, 7}, "1:R"), format);
    match({{w}}, "trainer", {{entry("w", {2, 4, 7}, "1:R")}}, "inference");
  };
  EXPECT_THAT(mismatch_of([&] { matched(Format::kNvfp4); }),
              HasSubstr("tensor w: dim 2 of shape 2x4x7 is odd, and nvfp4 packs two of its elements a byte"));
  EXPECT_NO_THROW(matched(Format::kMxfp8));
}

TEST(Match, SourcesTakeMemoryInProportion) {
  const Manifest sender{{entry("w", {1 << 20}, "1048576:S0")}};
  for (const std::vector<Slice>& slices : {std::vector<Slice>{}, {{0, 0}}}) {
    Manifest receiver;
    for (int i = 0; i < 65; ++i) receiver.entries.push_back(taken(entry(std::to_string(i), {0}, "1:R"), "w", slices));
    EXPECT_THAT(mismatch_of([&] { match(sender, "trainer", receiver, "inference"); }),
                HasSubstr("sources that inference names are of meshes of more than 67108864 ranks together"));
  }
}

TEST(Merge, RanksThatTakeDifferentSourcesDisagree) {
  const Manifest rank0{{taken(entry("w", {4}, "2:R"), "a")}};
  const Manifest rank1{{taken(entry("w", {4}, "2:R"), "b", {{0, 4}})}};
  const std::vector<ManifestDiff> diffs{{}, ManifestDiff::between(rank0, rank1)};
  EXPECT_THAT(mismatch_of([&] { merged("inference", rank0, diffs); }),
              HasSubstr("tensor w: inference/1 fills it with b [0:4], inference/0 with a"));
}

}  // namespace
}  // namespace tessera::bus
