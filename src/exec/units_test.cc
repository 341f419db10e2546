#include "exec/units.h"

#include <gtest/gtest.h>

#include <random>

namespace tessera {
namespace {

TEST(Units, CoverEveryAtomOnceInOrderAndAreOfEvenSize) {
  std::mt19937_64 random(1);
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int i = 0; i < 300; ++i) {
    std::vector<PartSize> parts(static_cast<size_t>(pick(0, 20)));
    for (PartSize& part : parts) part = {pick(0, 5) * pick(0, 400), int64_t{1} << pick(0, 3), pick(1, 50)};
    const int64_t unit_bytes = pick(64, 1000);
    std::vector<int64_t> next(parts.size(), 0);
    for (const Unit& unit : cut_into_units(parts, unit_bytes)) {
      int64_t bytes = 0;
      for_each_part(
          unit, [&](uint32_t p) { return parts[p].atoms; },
          [&](uint32_t p, int64_t first, int64_t last) {
            ASSERT_EQ(first, next[p]);
            next[p] = last;
            bytes += (last - first) * parts[p].atom_bytes;
          });
      EXPECT_GT(bytes, 0);
      EXPECT_LE(bytes, unit_bytes + 8);
    }
    for (size_t p = 0; p < parts.size(); ++p) EXPECT_EQ(next[p], parts[p].atoms);
  }
}

TEST(Units, AreCutBetweenRowsWhereRowsAreSmall) {
  const PartSize part{.atoms = 1000, .atom_bytes = 1, .row_atoms = 30};
  for (const Unit& unit : cut_into_units(std::span(&part, 1), 100)) EXPECT_EQ(unit.first_atom % 30, 0);
}

}  // namespace
}  // namespace tessera
