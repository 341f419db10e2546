#include "bus/registration/name_table.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>

namespace tessera::bus {
namespace {

TEST(NameTable, NumbersNamesAsTheyCome) {
  NameTable table(2);
  EXPECT_EQ(table.add("b"), 0u);
  EXPECT_EQ(table.add("a"), 1u);
  EXPECT_EQ(table.add("b"), 0u);
  EXPECT_EQ(table.find("a"), 1u);
  EXPECT_EQ(table.find("c"), std::nullopt);
  EXPECT_EQ(table.name(1), "a");
  EXPECT_EQ(table.size(), 2u);
}

TEST(NameTable, AnEmptyNameIsOne) {
  NameTable table(0);
  EXPECT_EQ(table.find(""), std::nullopt);
  EXPECT_EQ(table.add(""), 0u);
  EXPECT_EQ(table.find(""), 0u);
}

TEST(NameTable, AgreesWithAMapHoweverManyWereExpected) {
  for (const size_t expected : {0, 1, 1000, 5000}) {
    NameTable table(expected);
    std::map<std::string, uint32_t> numbers;
    std::minstd_rand random(static_cast<unsigned>(expected) + 1);
    for (int i = 0; i < 5000; ++i) {
      const auto name = numbers.emplace(fmt::format("layers.{}.weight", random() % 3000), numbers.size()).first;
      ASSERT_EQ(table.add(name->first), name->second);
    }
    EXPECT_EQ(table.size(), numbers.size());
    for (int i = 0; i < 3000; ++i) {
      const std::string name = fmt::format("layers.{}.weight", i);
      const auto known = numbers.find(name);
      ASSERT_EQ(table.find(name), known == numbers.end() ? std::nullopt : std::optional(known->second)) << name;
    }
  }
}

}  // namespace
}  // namespace tessera::bus
