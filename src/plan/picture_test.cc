// The elements of pictures of plans.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>
#include <set>

#include "plan/colour.h"
#include "plan/flow_matrix.h"
#include "plan/rank_boxes.h"
#include "tessera/plan.h"

namespace tessera::plan {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;

Plan plan_of(const char* shape, const char* src, const char* dst) {
  return redistribute({parse_shape(shape), DType::kBF16}, Layout::parse(src), Layout::parse(dst));
}

std::vector<std::string> found(const std::string& text, const char* pattern) {
  const std::regex regex(pattern);
  std::vector<std::string> all;
  for (std::sregex_iterator match(text.begin(), text.end(), regex), end; match != end; ++match)
    all.push_back((*match)[1]);
  return all;
}

constexpr const char* kBand = R"((fill-opacity="\.45"))";

TEST(Picture, ColoursAreHexadecimal) {
  for (const auto& [src, dst] : {std::pair("4:S0", "2@4-5:S1"), {"64:S0", "32@64-95:S1"}, {"64:Psum", "32@64-95:S0"}}) {
    const auto colours = found(plan_of("4096x4096", src, dst).to_svg(), R"re((?:fill|stroke)="([^"]*)")re");
    EXPECT_GT(colours.size(), 20U);
    EXPECT_THAT(colours, Each(MatchesRegex("#[0-9a-f]{3}|#[0-9a-f]{6}|none"))) << src;
  }
}

TEST(Picture, EveryRankHasAColourOfItsOwn) {
  EXPECT_EQ(rank_colour(0, 1), rank_colour(0, 64));
  for (const size_t count : {2, 12, 13, 64, 256}) {
    std::set<std::string> colours;
    for (size_t i = 0; i < count; ++i) colours.insert(rank_colour(i, count));
    EXPECT_EQ(colours.size(), count);
  }
}

TEST(Picture, BoxesHoldConsecutiveRanks) {
  const Layout layout = Layout::parse("7@8-14:S0");
  const RankBoxes apart(layout, 7);
  EXPECT_EQ(apart.size(), 7U);
  EXPECT_THAT(apart.ranks(6), ElementsAre(14));
  const RankBoxes shared(layout, 3);
  EXPECT_EQ(shared.size(), 3U);
  EXPECT_THAT(shared.ranks(0), ElementsAre(8, 9, 10));
  EXPECT_THAT(shared.ranks(2), ElementsAre(14));
  EXPECT_EQ(shared.box_of(13), 1U);
}

TEST(Picture, FewRanksHaveBands) {
  EXPECT_EQ(found(plan_of("4096x4096", "4:S0", "2@4-5:S1").to_svg(), kBand).size(), 8U);
}

TEST(Picture, ManyRanksHaveAMatrixThatNamesThem) {
  const std::string picture = plan_of("8192x8192", "64:S0", "32@64-95:S1").to_svg();
  EXPECT_THAT(found(picture, kBand), ElementsAre());
  for (int destination = 64; destination < 96; ++destination)
    EXPECT_THAT(picture, HasSubstr(">" + std::to_string(destination) + "</text>"));
  for (int source = 0; source < 64; source += 2)
    EXPECT_THAT(picture, HasSubstr(">" + std::to_string(source) + "</text>"));
  EXPECT_EQ(found(picture, "font-size=\"10\">(2 MiB)<").size(), 32U);
  EXPECT_THAT(picture, HasSubstr("full colour: 64 KiB"));
}

TEST(Picture, ACellIsAsPaleAsItsBytesAreFew) {
  const Plan plan = plan_of("8x8", "4:S0", "2@4-5:G0[0;2;8]");  // rank 4 takes two rows, rank 5 six
  SvgCanvas canvas(1200, 880);
  draw_flow_matrix(canvas, {100, 100, 200, 400}, plan, [](Rank rank) { return "#00000" + std::to_string(rank); });
  const std::string picture = canvas.take();
  EXPECT_THAT(found(picture, R"re(d="([^"]*)" fill="#00000\d" fill-opacity="1")re"),
              ElementsAre("M100 100h100v100h-100z", "M200 200h100v100h-100z", "M200 300h100v100h-100z",
                          "M200 400h100v100h-100z"));

  const Plan uneven = plan_of("8x8", "2:S0", "2@2-3:G0[0;1;8]");  // rank 0 sends a row, then three
  SvgCanvas second(1200, 880);
  draw_flow_matrix(second, {100, 100, 200, 400}, uneven, [](Rank rank) { return "#00000" + std::to_string(rank); });
  EXPECT_THAT(found(second.take(), R"re(fill-opacity="([^"]*)")re"), ElementsAre("0.5", "0.88", "1"));
}

TEST(Picture, TermsHaveAMatrixOfTheirOwn) {
  const std::string picture = plan_of("8192x8192", "64:Psum", "32@64-95:S1").to_svg();
  EXPECT_THAT(picture, HasSubstr("terms, to the ranks that reduce them; full colour: 2 MiB"));
  EXPECT_THAT(picture, HasSubstr("to destinations; full colour: 2 MiB"));
  EXPECT_THAT(picture, Not(HasSubstr("nan")));
}

}  // namespace
}  // namespace tessera::plan
