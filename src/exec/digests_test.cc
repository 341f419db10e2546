#include "exec/digests.h"

#include <gtest/gtest.h>

#include <set>

namespace tessera {
namespace {

TEST(DigestTable, RestsComeBehindTheRoutesAndPiecesBehindTheRests) {
  using enum SecondDigest;
  const std::vector<SecondDigest> kinds{kPiece, kRest, kNone, kPiece, kRest};
  const DigestTable table(kinds);
  EXPECT_EQ(table.routes(), 5u);
  EXPECT_EQ(table.size(), 9u);
  EXPECT_EQ(table.second(1), 5u);
  EXPECT_EQ(table.second(4), 6u);
  EXPECT_EQ(table.second(0), 7u);
  EXPECT_EQ(table.second(3), 8u);
  EXPECT_FALSE(table.has_second(2));
}

TEST(DigestTable, OfOneKindHasTwoARoute) {
  const DigestTable table(3, SecondDigest::kRest);
  EXPECT_EQ(table.size(), 6u);
  for (size_t route = 0; route < 3; ++route) EXPECT_EQ(table.second(route), 3 + route);
  EXPECT_EQ(DigestTable().size(), 0u);
}

}  // namespace
}  // namespace tessera
