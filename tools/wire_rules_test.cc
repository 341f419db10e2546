#include "tools/wire_rules.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/testing.h"

namespace tessera::tools {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

WireRules wires(const std::vector<std::string>& texts) {
  return WireRules::parse(texts);
}

TEST(WireRules, TheFirstMatchOfTheWholeNameWins) {
  const WireRules rules = wires({"lm_head.*=none", "layer\\.0\\..*=MXFP8", ".*weight=nvfp4"});
  EXPECT_EQ(rules.find("lm_head.weight"), std::nullopt);
  EXPECT_EQ(rules.find("layer.0.weight"), Format::kMxfp8);
  EXPECT_EQ(rules.find("layer.1.weight"), Format::kNvfp4);
  EXPECT_EQ(rules.find("layer.1.weight_scale"), std::nullopt);
  EXPECT_EQ(wires({}).find("layer.1.weight"), std::nullopt);
}

TEST(WireRules, AFormatAloneIsForAllNames) {
  for (const std::string& name : {std::string("w"), std::string("a\nb"), std::string("a=b"), std::string()}) {
    EXPECT_EQ(wires({"nvfp4"}).find(name), Format::kNvfp4) << name;
    EXPECT_EQ(wires({"NVFP4"}).find(name), Format::kNvfp4) << name;
    EXPECT_EQ(wires({"none"}).find(name), std::nullopt) << name;
  }
  EXPECT_EQ(wires({"w=mxfp8", "nvfp4"}).find("w"), Format::kMxfp8);
  EXPECT_EQ(wires({"w=mxfp8", "nvfp4"}).find("v"), Format::kNvfp4);
}

TEST(WireRules, TheFirstEqualsDivides) {
  EXPECT_EQ(wires({"a\\x3db=fp8_e4m3"}).find("a=b"), Format::kFp8E4M3);
  EXPECT_THAT(error_of([] { wires({"a=b=fp8_e4m3"}); }), HasSubstr("unknown format 'b=fp8_e4m3'"));
}

TEST(WireRules, ARuleThatMatchesNothingIsRefused) {
  const std::vector<std::string> names{"layer.0.q_proj.weight", "lm_head.weight"};
  wires({".*=nvfp4", "lm_head.*=none"}).require_matches(names);  // also behind one that takes all
  EXPECT_THAT(
      error_of([&] { wires({"lm_head.*=none", "q_proj=mxfp8"}).require_matches(names); }),
      HasSubstr("--wire: \"q_proj\" matches none of the 2 tensors (\"layer.0.q_proj.weight\", \"lm_head.weight\"): "));
}

TEST(WireRules, BadRulesAreNamedAndFormatsListed) {
  EXPECT_THAT(error_of([] { wires({".*"}); }),
              AllOf(HasSubstr("wire rule \".*\": unknown format '.*'"), HasSubstr("write REGEX=FORMAT")));
  EXPECT_THAT(error_of([] { wires({"(=nvfp4"}); }), HasSubstr("wire rule \"(=nvfp4\": bad regex \"(\""));
  EXPECT_THAT(error_of([] { wires({".*=fp4"}); }),
              AllOf(HasSubstr("wire rule \".*=fp4\": unknown format 'fp4': use one of fp8_e4m3, "),
                    HasSubstr("nvfp4, or none")));
}

}  // namespace
}  // namespace tessera::tools
