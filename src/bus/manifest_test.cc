#include "bus/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera::bus {
namespace {

using testing::AllOf;
using testing::HasSubstr;

ManifestEntry entry(const std::string& name, const Shape& shape, const std::string& layout, DType dtype = DType::kF32) {
  return {.name = name, .dtype = dtype, .shape = shape, .layout = Layout::parse(layout).bind(shape)};
}

std::vector<std::string> names(const Manifest& manifest) {
  std::vector<std::string> all;
  for (const ManifestEntry& one : manifest.entries) all.push_back(one.name);
  return all;
}

// The diffs that ranks 1, 2, ... would publish against rank 0.
std::vector<ManifestDiff> diffs(const Manifest& rank0, const std::vector<Manifest>& others) {
  std::vector<ManifestDiff> all(1);
  for (const Manifest& other : others) all.push_back(ManifestDiff::between(rank0, other));
  return all;
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kMismatch);
    return error.what();
  }
  return "no error";
}

TEST(Manifest, ComesBackAsItWasWritten) {
  const Manifest manifest{{entry("a", {4, 6}, "2:S0"), entry("b", {}, "2:R", DType::kI64), entry("c", {0, 3}, "2:S0")}};
  ByteWriter out;
  manifest.write(out);
  ByteReader in(out.view(), "manifest");
  const Manifest read = Manifest::read(in);
  in.finish();
  ASSERT_EQ(names(read), names(manifest));
  EXPECT_EQ(read.entries[0].layout, manifest.entries[0].layout);
  EXPECT_EQ(read.entries[1].dtype, DType::kI64);
  EXPECT_EQ(read.hash(), manifest.hash());
}

// A peer's few bytes do not become many: a layout of a million ranks takes eleven.
TEST(Manifest, TakesMemoryInProportionToItsBytes) {
  const auto write = [](size_t layouts, size_t tensors) {
    ByteWriter out;
    out.put(static_cast<uint32_t>(layouts));
    for (size_t i = 0; i < layouts; ++i) out.put_string("1048576:R");
    out.put(static_cast<uint32_t>(tensors));
    for (size_t i = 0; i < tensors; ++i) {
      out.put_string(std::to_string(i));
      out.put(DType::kF32);
      out.put(uint8_t{0});
      out.put(uint32_t{0});
    }
    return out.take();
  };
  const std::vector<std::byte> sound = write(1, 2);
  ByteReader in(sound, "manifest");
  const Manifest read = Manifest::read(in);
  EXPECT_EQ(read.entries[0].layout.mesh().ranks().data(), read.entries[1].layout.mesh().ranks().data());
  const std::vector<std::byte> bloated = write(17, 1);
  ByteReader too_many(bloated, "manifest");
  EXPECT_THROW(Manifest::read(too_many), Error);
}

TEST(Manifest, EveryTruncationIsAnError) {
  ByteWriter out;
  Manifest{{entry("a", {4, 6}, "2:S0"), entry("b", {8}, "2:R")}}.write(out);
  for (size_t size = 0; size < out.size(); ++size) {
    ByteReader in(out.view().first(size), "manifest");
    EXPECT_THROW(Manifest::read(in), Error) << size;
  }
}

TEST(Merge, EqualRanksGiveRankZerosList) {
  const Manifest manifest{{entry("a", {4, 6}, "2:S0"), entry("b", {8}, "2:R")}};
  const auto none = diffs(manifest, {manifest});
  EXPECT_TRUE(none[1].empty());
  EXPECT_EQ(names(merge("trainer", manifest, none)), names(manifest));
}

TEST(Merge, StagesOfAPipelineAddUp) {
  const Manifest first{{entry("layer0", {4}, "1@0:R")}};
  const Manifest second{{entry("layer1", {4}, "1@1:R")}};
  const Manifest merged = merge("trainer", first, diffs(first, {second}));
  EXPECT_EQ(names(merged), (std::vector<std::string>{"layer0", "layer1"}));
}

TEST(Merge, DisjointMeshesOfOneNameAreReplicas) {
  const Manifest even{{entry("norm", {8}, "2@0,2:S0")}};
  const Manifest odd{{entry("norm", {8}, "2@1,3:S0")}};
  const Manifest merged = merge("trainer", even, diffs(even, {odd, even, odd}));
  ASSERT_EQ(merged.entries.size(), 1u);
  EXPECT_EQ(merged.entries[0].layout.to_string(), "replica=2,2@0,2,1,3:R,S0");
}

TEST(Merge, EveryDisagreementIsNamed) {
  const Manifest rank0{{entry("a", {4, 6}, "2:S0"), entry("b", {8}, "2:R"), entry("c", {8}, "2:R")}};
  const Manifest rank1{{entry("a", {4, 5}, "2:S0"), entry("b", {8}, "2:R", DType::kBF16)}};
  const std::string text = error_of([&] { merge("trainer", rank0, diffs(rank0, {rank1})); });
  EXPECT_THAT(text, AllOf(HasSubstr("tensor a: trainer/1 has shape 4x5, trainer/0 has 4x6"),
                          HasSubstr("tensor b: trainer/1 has dtype bf16, trainer/0 has f32"),
                          HasSubstr("tensor c: trainer/1 is in its mesh (2:R) but does not register it")));
}

TEST(Merge, OverlappingMeshesAreNoReplicas) {
  const Manifest rank0{{entry("a", {4}, "2@0-1:R")}};
  const Manifest rank2{{entry("a", {4}, "2@1-2:R")}};
  const std::string text = error_of([&] { merge("trainer", rank0, diffs(rank0, {rank0, rank2})); });
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
  const std::string text = error_of([&] { match(sender, "trainer", receiver, "inference"); });
  EXPECT_THAT(text, AllOf(HasSubstr("tensor a: shape 4 in trainer, 5 in inference"),
                          HasSubstr("tensor b: dtype i64 in trainer cannot be cast to f32 in inference"),
                          HasSubstr("tensor c: inference asks for layout 1:Psum"),
                          HasSubstr("tensor d: trainer does not offer it")));
}

}  // namespace
}  // namespace tessera::bus
