#include "tools/list_option.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera::tools {
namespace {

using ::testing::ElementsAre;

// The values of a command's options --layout and --rank after it has parsed `args`.
std::vector<std::string> layouts_of(const std::vector<std::string>& args) {
  CLI::App app;
  std::vector<std::string> layouts;
  int rank = 0;
  add_list(app, "--layout", layouts, "");
  app.add_option("--rank", rank);
  std::vector<std::string> reversed = expand_lists(args);
  std::ranges::reverse(reversed);
  app.parse(std::move(reversed));
  return layouts;
}

TEST(ListOption, SeveralValuesSeveralFlagsAndEqualsAreOne) {
  const auto expected = ElementsAre("a=2:R", "b=2:S0");
  EXPECT_THAT(layouts_of({"--layout", "a=2:R", "b=2:S0", "--rank", "1"}), expected);
  EXPECT_THAT(layouts_of({"--layout", "a=2:R", "--rank", "1", "--layout", "b=2:S0"}), expected);
  EXPECT_THAT(layouts_of({"--layout=a=2:R", "b=2:S0"}), expected);
}

TEST(ListOption, AValueInBracketsStaysWhole) {
  EXPECT_THAT(layouts_of({"--layout", "[ab],c=2:G0[0;4;8]", "[x]"}), ElementsAre("[ab],c=2:G0[0;4;8]", "[x]"));
}

TEST(ListOption, OtherOptionsAreLeftAlone) {
  EXPECT_THAT(expand_lists({"send", "--rank", "1", "stray"}), ElementsAre("send", "--rank", "1", "stray"));
  EXPECT_THROW(layouts_of({"--rank", "1", "stray"}), CLI::ExtrasError);
  EXPECT_THROW(layouts_of({"--layout"}), CLI::ParseError);
}

TEST(ListOption, AnEmptyValueIsRefusedWhereverItStands) {
  EXPECT_THROW(layouts_of({"--layout", ""}), CLI::ValidationError);
  EXPECT_THROW(layouts_of({"--layout", "a=2:R", ""}), CLI::ValidationError);
  EXPECT_THROW(layouts_of({"--layout="}), CLI::ParseError);
}

}  // namespace
}  // namespace tessera::tools
