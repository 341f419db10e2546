#include "tools/layout_rules.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/fail.h"

namespace tessera::tools {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

LayoutRules rules(const std::vector<std::string>& texts) {
  return LayoutRules::parse(texts);
}

std::vector<TensorInfo> named(const std::vector<std::string>& names, const Shape& shape = {8, 8}) {
  std::vector<TensorInfo> tensors;
  for (const std::string& name : names) tensors.push_back({name, DType::kF32, shape});
  return tensors;
}

template <typename Body>
std::string complaint(Body body) {
  try {
    body();
    return "none";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), Not(HasSubstr("\n")));
    return error.what();
  }
}

TEST(LayoutRules, TheFirstMatchOfTheWholeNameWins) {
  const LayoutRules r = rules({"layer\\.0\\..*=tp=2:S1", ".*bias=2:R", "layer.*=fsdp=2:S0"});
  const auto layout_of = [&](const char* name) { return r.find(name) == nullptr ? "none" : r.find(name)->to_string(); };
  EXPECT_EQ(layout_of("layer.0.bias"), Layout::parse("tp=2:S1").to_string());
  EXPECT_EQ(layout_of("layer.1.bias"), Layout::parse("2:R").to_string());
  EXPECT_EQ(layout_of("layer.1.weight"), Layout::parse("fsdp=2:S0").to_string());
  EXPECT_EQ(layout_of("my.layer.1.weight"), "none");  // matching a part of the name is not enough
  EXPECT_EQ(layout_of("bias.weight"), "none");
}

TEST(LayoutRules, TheFirstEqualsDivides) {
  EXPECT_EQ(*rules({"a=dp=2,tp=2:R,S0"}).find("a"), Layout::parse("dp=2,tp=2:R,S0"));
  EXPECT_NE(rules({"a\\x3db=2:R"}).find("a=b"), nullptr);
}

TEST(LayoutRules, NamesMayHoldAnything) {
  const LayoutRules r = rules({R"(a\nb.*=2:R)"});
  EXPECT_NE(r.find("a\nbc"), nullptr);
  const std::string long_name(1 << 20, 'x');
  EXPECT_NE(rules({"(x+x+)+=2:R"}).find(long_name), nullptr);  // linear in the name's length, without deep recursion
}

TEST(LayoutRules, BadRulesAreNamed) {
  EXPECT_THAT(complaint([] { rules({".*"}); }), HasSubstr("\".*\": no '='"));
  EXPECT_THAT(complaint([] { rules({"(=2:R"}); }), HasSubstr("bad regex \"(\""));
  EXPECT_THAT(complaint([] { rules({"a=2:X"}); }), HasSubstr("layout rule \"a=2:X\": "));
}

TEST(LayoutRules, UnmatchedTensorsAreListedAndCounted) {
  const LayoutRules r = rules({"w.*=2:R"});
  EXPECT_EQ(r.assign(named({"w1", "w2"})).size(), 2u);
  EXPECT_THAT(complaint([&] { r.assign(named({"w1", "b1", "c\n"})); }),
              HasSubstr("no layout rule matches 2 of 3 tensors: \"b1\", \"c\\n\""));
  std::vector<std::string> many;
  for (int i = 0; i < 1000; ++i) many.push_back(fmt::format("b{}", i));
  const std::string text = complaint([&] { r.assign(named(many)); });
  EXPECT_THAT(text, HasSubstr("\"b99\" and 900 more"));
  const std::string prefix(119, 'x');
  EXPECT_THAT(complaint([&] { r.assign(named({prefix + "yz", prefix + "y"})); }),
              HasSubstr(fmt::format("tensors: \"{0}y\"..., \"{0}y\"; add", prefix)));
}

TEST(LayoutRules, ALayoutThatDoesNotFitNamesTensorAndRule) {
  const std::string text = complaint([] { rules({".*=2:S1"}).assign(named({"v"}, {8})); });
  EXPECT_THAT(text, HasSubstr("tensor \"v\" of shape 8 under rule \".*=2:S1\""));
}

TEST(LayoutRules, AssignedLayoutsAreBound) {
  EXPECT_EQ(rules({".*=2:S-1"}).assign(named({"w"})).front(), Layout::parse("2:S1"));
}

TEST(NameFilter, MatchesWholeNames) {
  const NameFilter filter = NameFilter::parse(std::vector<std::string>{"a.*", "[bc]"}, "--skip");
  EXPECT_TRUE(filter.matches("a1"));
  EXPECT_TRUE(filter.matches("c"));
  EXPECT_FALSE(filter.matches("ca"));
  EXPECT_THAT(complaint([] { NameFilter::parse(std::vector<std::string>{"["}, "--skip"); }), HasSubstr("--skip: bad"));
  EXPECT_FALSE(NameFilter::parse({}, "--skip").matches("a"));
}

}  // namespace
}  // namespace tessera::tools
