#include "bus/sender/numbering.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>

namespace tessera::bus {
namespace {

// A send by default; returns its number.
int64_t send(Numbering& numbers) {
  const int64_t version = numbers.of(std::nullopt);
  numbers.begin(version, false);
  numbers.end();
  return version;
}

TEST(NumberingTest, CountsEverySend) {
  Numbering numbers;
  numbers.meet(0);
  EXPECT_EQ(send(numbers), 1);
  EXPECT_EQ(send(numbers), 2);
  EXPECT_EQ(numbers.of(7), 7);
  numbers.begin(7, true);
  EXPECT_TRUE(numbers.given());
  EXPECT_EQ(numbers.tried(), 2) << "it is under way";
  numbers.end();
  EXPECT_EQ(numbers.tried(), 7);
  numbers.begin(3, true);  // a lower one, once more
  numbers.end();
  EXPECT_EQ(send(numbers), 8);
  EXPECT_FALSE(numbers.given());
}

TEST(NumberingTest, ARankThatComesBackFollowsUntilAVersionIsTaken) {
  Numbering numbers;
  EXPECT_TRUE(numbers.meet(4));
  EXPECT_TRUE(numbers.follows());
  EXPECT_EQ(numbers.tried(), 4);
  numbers.hear(6, false);
  EXPECT_EQ(send(numbers), 6);
  numbers.hear(6, false);
  EXPECT_EQ(numbers.of(std::nullopt), 7) << "it never goes back";
  EXPECT_TRUE(numbers.meet(9));
  EXPECT_EQ(send(numbers), 10);
  numbers.begun();
  EXPECT_FALSE(numbers.meet(20));
  numbers.hear(20, false);
  EXPECT_EQ(send(numbers), 11);
}

TEST(NumberingTest, ARankThatWasThereCountsByItselfUnlessItMust) {
  Numbering numbers;
  EXPECT_TRUE(numbers.meet(0));
  EXPECT_FALSE(numbers.follows());
  EXPECT_EQ(send(numbers), 1);
  EXPECT_FALSE(numbers.meet(5)) << "the others have sent what is this rank's to be sent next";
  numbers.hear(5, false);
  EXPECT_EQ(send(numbers), 2);
  numbers.hear(5, true);
  EXPECT_EQ(send(numbers), 5);
}

}  // namespace
}  // namespace tessera::bus
