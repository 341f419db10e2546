#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/testing.h"
#include "layout/random_layout.h"
#include "tessera/layout.h"

namespace tessera {
namespace {

std::string parse_error(const std::string& text) {
  return error_of([&] { Layout::parse(text); });
}

TEST(LayoutTextTest, APlacementAsTorchSpellsItIsAnsweredWithHowItIsWrittenHere) {
  const std::vector<std::pair<std::string, std::string>> cases{
      {"Shard(0)", "S0"},
      {"Shard(dim=-1)", "S-1"},
      {"Replicate()", "R"},
      {"Replicate", "R"},
      {"Partial()", "Psum"},
      {"Partial(avg)", "Pavg"},
      {"_StridedShard(dim=0, sf=2)", "S0*2"},
      {"_StridedShard(1,split_factor=4)", "S1*4"},
  };
  for (const auto& [spelled, written] : cases) {
    const std::string error = error_of([&] { Layout::parse("2:" + spelled); });
    const std::string expected = "at 3: expected " + written + " (which is how that placement is written here), got ";
    EXPECT_NE(error.find(expected), std::string::npos) << error;
    EXPECT_NO_THROW(Layout::parse("2:" + written));
  }
  for (const char* other : {"Shard(x)", "Shard(99999999999999999999)", "Shard", "Rows(0)", "Shard(0"})
    EXPECT_NE(error_of([&] { Layout::parse(std::string("2:") + other); }), "(no error)") << other;
}

TEST(LayoutTextTest, ReadsEveryPart) {
  const Layout layout = Layout::parse("dp=2,tp=4@0-7:R,S1");
  EXPECT_EQ(layout, Layout(Mesh({{"dp", 2}, {"tp", 4}}), {Replicate{}, Shard{1}}));
  EXPECT_EQ(Layout::parse("4@0,2,4-5:S-1*2"), Layout(Mesh({{"", 4}}, {0, 2, 4, 5}), {StridedShard{-1, 2}}));
  EXPECT_EQ(Layout::parse("4:G0[0;16;32;48;63]"), Layout(Mesh({{"", 4}}), {RaggedShard{0, {0, 16, 32, 48, 63}}}));
  EXPECT_EQ(Layout::parse("1,2,3,1,1:Psum,Pavg,Pmin,Pmax,Pproduct"),
            Layout(Mesh({{"", 1}, {"", 2}, {"", 3}, {"", 1}, {"", 1}}),
                   {Partial{ReduceOp::kSum}, Partial{ReduceOp::kAvg}, Partial{ReduceOp::kMin}, Partial{ReduceOp::kMax},
                    Partial{ReduceOp::kProduct}}));
}

TEST(LayoutTextTest, PrintsRanksOnlyWhereTheySaySomething) {
  const struct {
    std::string_view text, printed;
  } cases[] = {
      {"dp=2,tp=4@0-7:R,S1", "dp=2,tp=4:R,S1"},
      {"8@0,1,2,3,4,5,6,7:R", "8:R"},
      {"4@4,5,6,7:S0", "4@4-7:S0"},
      {"5@0,2,4-6:S0", "5@0,2,4-6:S0"},
      {"4@3,2,1,0:S0", "4@3,2,1,0:S0"},
      {"2@2147483646-2147483647:R", "2@2147483646-2147483647:R"},
      {"1@007:G-1[0;3]", "1@7:G-1[0;3]"},
  };
  for (const auto& [text, printed] : cases) EXPECT_EQ(Layout::parse(text).to_string(), printed);
}

TEST(LayoutTextTest, WhatIsPrintedReadsBackAsTheSame) {
  RandomLayouts random(5);
  for (int i = 0; i < 5000; ++i) {
    const Layout layout = random.layout(random.shape());
    ASSERT_EQ(Layout::parse(layout.to_string()), layout) << layout.to_string();
  }
}

TEST(LayoutTextTest, ErrorsSayWhereAndWhatWasExpected) {
  constexpr const char* kPlacement =
      "expected a placement (R, S<dim>, S<dim>*<factor>, G<dim>[<bound>;...], Psum|Pavg|Pmin|Pmax|Pproduct), got ";
  constexpr const char* kAxis = "expected an axis (name=size or size) of 1 to 1048576, got ";
  const struct {
    std::string text, message;
  } cases[] = {
      {"", std::string(" at 1: ") + kAxis + "the end"},
      {"@0-3:R", std::string(" at 1: ") + kAxis + "\"@0-3\""},
      {"0:R", std::string(" at 1: ") + kAxis + "\"0\""},
      {"-2:R", std::string(" at 1: ") + kAxis + "\"-2\""},
      {"1000000000:S0", std::string(" at 1: ") + kAxis + "\"1000000000\""},
      {"2,:R,R", std::string(" at 3: ") + kAxis + "\":R\""},
      {"dp:R", " at 3: expected \"=\" and the size of the axis, got \":R\""},
      {"dp=x:R", " at 4: expected a size of 1 to 1048576, got \"x\""},
      {"dp=99999999999999999999:R", " at 4: expected a size of 1 to 1048576, got \"99999999999999999999\""},
      {"1,1,1,1,1,1,1,1,1:R", " at 17: expected at most 8 axes, got \"1\""},
      {"2", " at 2: expected \",\" and another axis, \"@\" and the ranks, or \":\" and the placements, got the end"},
      {"2 :R", " at 2: expected \",\" and another axis, \"@\" and the ranks, or \":\" and the placements, got \" \""},
      {"2@:R,R", " at 3: expected a rank from 0 to 2147483647, got \":R\""},
      {"2@0-999999999999:R", " at 5: expected a rank from 0 to 2147483647, got \"999999999999\""},
      {"2@0-2000000000:R", " at 3: expected at most 1048576 ranks in all, got \"0-2000000000\""},
      {"2@0-1048575,7:R", " at 13: expected at most 1048576 ranks in all, got \"7\""},
      {"2@3-1:R", " at 5: expected a rank from 3 to 2147483647, got \"1\""},
      {"2@0-1", " at 6: expected \",\" and more ranks, or \":\" and the placements, got the end"},
      {"2@0-1;S0", " at 6: expected \",\" and more ranks, or \":\" and the placements, got \";S0\""},
      {"dp=2@0-1:X", std::string(" at 10: ") + kPlacement + "\"X\""},
      {"2:", std::string(" at 3: ") + kPlacement + "the end"},
      {"2,2:R,", std::string(" at 7: ") + kPlacement + "the end"},
      {"2:Pmedian", std::string(" at 3: ") + kPlacement + "\"Pmedian\""},
      {"2:s0", std::string(" at 3: ") + kPlacement + "\"s0\""},
      {"2:S", " at 4: expected a dim from -8 to 7, got the end"},
      {"2:S8", " at 4: expected a dim from -8 to 7, got \"8\""},
      {"2:S0*", " at 6: expected a split factor of at least 1, got the end"},
      {"2:S0*0", " at 6: expected a split factor of at least 1, got \"0\""},
      {"2:S0*-3", " at 6: expected a split factor of at least 1, got \"-3\""},
      {"2:G0", " at 5: expected \"[\" and the bounds, got the end"},
      {"2:G0[]", " at 6: expected a bound, got \"]\""},
      {"2:G0[0;8", " at 9: expected \";\" or \"]\", got the end"},
      {"2:G0[0,8]", " at 7: expected \";\" or \"]\", got \",8\""},
      {"2:R0", " at 4: expected \",\" and another placement, or the end, got \"0\""},
      {"2:R\n", " at 4: expected \",\" and another placement, or the end, got \"\\x0a\""},
      {"dp=2@0-7:R", ": 8 ranks for a mesh of 2"},
      {"2@3,3:R", ": rank 3 is twice in the mesh"},
      {"a=2,a=2:R,R", ": two mesh axes are named \"a\""},
      {"1024,1024,2:R,R,R", ": a mesh of more than 1048576 ranks"},
      {"2,4:R", ": 1 placement for a mesh of 2 axes: it takes one for each axis"},
  };
  for (const auto& [text, message] : cases) {
    const std::string shown = text == "2:R\n" ? "2:R\\x0a" : text;
    EXPECT_EQ(parse_error(text), "layout \"" + shown + "\"" + message);
  }
}

TEST(LayoutTextTest, ErrorsStayOnOneShortLine) {
  for (const std::string& text : {std::string(1'000'000, ','), "2:G0[" + std::string(500'000, '0') + "x",
                                  std::string("\0\n\r\x7f", 4) + std::string(100'000, '"')}) {
    const std::string message = parse_error(text);
    EXPECT_LT(message.size(), 1500U);
    EXPECT_EQ(message.find_first_of(std::string("\0\n\r\x7f", 4)), std::string::npos);
  }
}

TEST(LayoutTextTest, NoPrefixOfATextCrashesTheParser) {
  RandomLayouts random(6);
  for (int i = 0; i < 300; ++i) {
    std::string text = random.layout(random.shape()).to_string();
    for (size_t end = 0; end < text.size(); ++end) parse_error(text.substr(0, end));
    for (char& c : text) {
      const char kept = std::exchange(c, "0-9,;:@=*[]RSGP\n\xff"[random.draw(0, 16)]);
      parse_error(text);
      c = kept;
    }
  }
}

TEST(ShapeTextTest, ReadsBackWhatItPrints) {
  const struct {
    std::string_view text;
    Shape shape;
  } cases[] = {{"4096x4096", {4096, 4096}},
               {"scalar", {}},
               {"16", {16}},
               {"0x3x0", {0, 3, 0}},
               {"1x1x1x1x1x1x1x2", {1, 1, 1, 1, 1, 1, 1, 2}}};
  for (const auto& [text, shape] : cases) {
    EXPECT_EQ(parse_shape(text), shape);
    EXPECT_EQ(to_string_shape(shape), text);
  }
}

TEST(ShapeTextTest, RefusesWhatIsNoShape) {
  constexpr const char* kSize = "expected a size (\"4096x4096\", or \"scalar\" for no dims), got ";
  const struct {
    std::string text, message;
  } cases[] = {
      {"", std::string("shape \"\" at 1: ") + kSize + "the end"},
      {"4x", std::string("shape \"4x\" at 3: ") + kSize + "the end"},
      {"4x-1", std::string("shape \"4x-1\" at 3: ") + kSize + "\"-1\""},
      {"4X4", "shape \"4X4\" at 2: expected \"x\" or the end, got \"X4\""},
      {"1x1x1x1x1x1x1x1x1", "shape \"1x1x1x1x1x1x1x1x1\": more than 8 dims"},
      {"9999999999x9999999999", "shape 9999999999x9999999999: more than 2^62 elements"},
      {"9999999999x9999999999x0", "shape 9999999999x9999999999x0: more than 2^62 elements"},
  };
  for (const auto& [text, message] : cases) EXPECT_EQ(error_of([&] { parse_shape(text); }), message);
}

TEST(ShapeTest, CountsElements) {
  EXPECT_EQ(element_count(Shape{}), 1);
  EXPECT_EQ(element_count(Shape{3, 0, 5}), 0);
  EXPECT_EQ(element_count(Shape{kMaxElements}), kMaxElements);
  EXPECT_EQ(element_count(Shape{Index{1} << 31, Index{1} << 31}), kMaxElements);
  EXPECT_EQ(error_of([] { element_count(Shape{3, -1}); }), "shape 3x-1: the size -1 is negative");
  EXPECT_EQ(error_of([] { element_count(Shape(9, 1)); }), "a shape of 9 dims: at most 8 are supported");
}

}  // namespace
}  // namespace tessera
