#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/testing.h"
#include "tessera/layout.h"

namespace tessera {
namespace {

TEST(MeshTest, RanksLieRowMajor) {
  const Mesh mesh({{"dp", 2}, {"tp", 3}}, 10);
  EXPECT_EQ(mesh.size(), 6);
  EXPECT_EQ(mesh.position_of(14), 4);
  EXPECT_THAT(mesh.coordinate(4), testing::ElementsAre(1, 1));
  EXPECT_EQ(mesh.position_of(9), std::nullopt);
  EXPECT_EQ(mesh.position_of(16), std::nullopt);
}

TEST(MeshTest, FindsScatteredRanks) {
  const Mesh mesh({{"", 2}, {"", 2}}, {7, 3, 1000, 0});
  for (int i = 0; i < 4; ++i) EXPECT_EQ(mesh.position_of(mesh.ranks()[static_cast<size_t>(i)]), i);
  EXPECT_EQ(mesh.position_of(1), std::nullopt);
  EXPECT_EQ(mesh.position_of(-1), std::nullopt);
  EXPECT_EQ(mesh.position_of(2'000'000'000), std::nullopt);
}

TEST(MeshTest, ANamelessEmptyMeshHoldsNobody) {
  EXPECT_EQ(Mesh().size(), 0);
  EXPECT_EQ(Mesh().position_of(0), std::nullopt);
}

TEST(MeshTest, RefusesWhatIsNoMesh) {
  EXPECT_EQ(error_of([] { Mesh({{"a", 2}}, std::vector<Rank>{0}); }), "1 rank for a mesh of 2");
  EXPECT_EQ(error_of([] { Mesh({{"a", 3}}, {4, 0, 4}); }), "rank 4 is twice in the mesh");
  EXPECT_EQ(error_of([] { Mesh({{"a", 2}}, {0, -1}); }), "rank -1 in a mesh: ranks are not negative");
  EXPECT_EQ(error_of([] { Mesh({{"a", 0}}); }), "mesh axis 0 has size 0: it must be at least 1");
  EXPECT_EQ(error_of([] { Mesh({{"a", 2}, {"a", 2}}); }), "two mesh axes are named \"a\"");
  EXPECT_EQ(error_of([] { Mesh({{"", 2}, {"a,b", 2}}); }),
            "mesh axis 1 is named \"a,b\": a name is letters, digits, '_', '-' and '.'");
  EXPECT_EQ(error_of([] { Mesh({}, std::vector<Rank>{}); }), "a mesh of 0 axes: it must have 1 to 8");
  EXPECT_EQ(error_of([] { Mesh({{"a", 2}}, 2147483647); }), "2 ranks from 2147483647: ranks are 0 to 2147483647");
  EXPECT_EQ(error_of([] { Mesh({{"a", 1 << 30}, {"b", 1 << 30}}); }), "a mesh of more than 1048576 ranks");
}

TEST(MeshTest, AMillionRanksAreFound) {
  std::vector<Rank> ranks;
  for (Rank i = 0; i < kMaxRanks; ++i) ranks.push_back(2 * (kMaxRanks - i));
  const Mesh mesh({{"", 1 << 10}, {"", 1 << 10}}, ranks);
  EXPECT_EQ(mesh.position_of(ranks[777'777]), 777'777);
  EXPECT_EQ(mesh.position_of(ranks[777'777] + 1), std::nullopt);
}

}  // namespace
}  // namespace tessera
