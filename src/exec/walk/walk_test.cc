#include "exec/walk/walk.h"

#include <gtest/gtest.h>

#include <set>

#include "exec/testing.h"

namespace tessera {
namespace {

using exec_testing::for_each_atom;
using exec_testing::pick;
using exec_testing::PlainOffsets;
using exec_testing::Random;
using exec_testing::RandomRoute;

struct Atom {
  int64_t src, dst, image;
  auto operator<=>(const Atom&) const = default;
};

std::vector<Atom> walked(const Walk& walk, int64_t first, int64_t last, int64_t bytes) {
  std::vector<Atom> atoms;
  walk.visit(first, last, [&](const Block& block) {
    for (int64_t r = 0; r < block.rows; ++r)
      for (int64_t a = 0; a < block.row_atoms; ++a)
        atoms.push_back({block.offset[kSource] + r * block.row_step[kSource] + a * bytes,
                         block.offset[kDestination] + r * block.row_step[kDestination] + a * bytes,
                         block.offset[kImage] + r * block.row_step[kImage] + a * bytes});
  });
  return atoms;
}

std::vector<Atom> plainly(const RandomRoute& route) {
  const Index per_atom = elements_per_atom(route.what.dtype);
  const PlainOffsets src(route.src.array, per_atom), dst(route.dst.array, per_atom);
  std::vector<Atom> atoms;
  for_each_atom(route.what, [&](const std::vector<Index>& at) {
    int64_t flat = 0;
    for (size_t d = 0; d < at.size(); ++d)
      flat = flat * (d + 1 == at.size() ? route.what.shape[d] / per_atom : route.what.shape[d]) + at[d];
    atoms.push_back({src.of(at), dst.of(at), flat * atom_bytes(route.what.dtype)});
  });
  return atoms;
}

TEST(Walk, VisitsEveryAtomOnceInRowMajorOrderFromAnywhere) {
  Random random(1);
  for (int i = 0; i < 400; ++i) {
    const DType dtype = i % 3 == 0 ? DType::kF4 : i % 3 == 1 ? DType::kF32 : DType::kU8;
    const RandomRoute route = RandomRoute::make(random, dtype, dtype);
    const std::vector<Atom> expected = plainly(route);
    const WalkArrays arrays{.src = &route.src.array, .dst = &route.dst.array, .dst_dtype = dtype, .image = true};
    const Walk walk = make_walk(route.what, arrays, Walk::Order::kRowMajor);
    ASSERT_EQ(walk.atoms(), static_cast<int64_t>(expected.size()));
    ASSERT_EQ(walked(walk, 0, walk.atoms(), atom_bytes(dtype)), expected) << route.what.region.to_string();
    const auto first = pick(random, 0, walk.atoms());
    const auto last = pick(random, first, walk.atoms());
    ASSERT_EQ(walked(walk, first, last, atom_bytes(dtype)),
              std::vector<Atom>(expected.begin() + first, expected.begin() + last));
  }
}

TEST(Walk, VisitsTheSameAtomsInFreeOrder) {
  Random random(2);
  for (int i = 0; i < 200; ++i) {
    const RandomRoute route = RandomRoute::make(random, DType::kBF16, DType::kBF16, 12);
    const WalkArrays arrays{.src = &route.src.array, .dst = &route.dst.array, .dst_dtype = DType::kBF16, .image = true};
    const Walk walk = make_walk(route.what, arrays, Walk::Order::kFree);
    const auto middle = pick(random, 0, walk.atoms());
    std::vector<Atom> got = walked(walk, 0, middle, 2);
    for (const Atom& atom : walked(walk, middle, walk.atoms(), 2)) got.push_back(atom);
    const std::vector<Atom> expected = plainly(route);
    ASSERT_EQ(std::multiset<Atom>(got.begin(), got.end()), std::multiset<Atom>(expected.begin(), expected.end()));
  }
}

TEST(Walk, ItsExtentIsTheFirstAndLastByteTouched) {
  Random random(3);
  for (int i = 0; i < 200; ++i) {
    const RandomRoute route = RandomRoute::make(random, DType::kI16, DType::kI16);
    const WalkArrays arrays{.src = &route.src.array, .dst = &route.dst.array, .dst_dtype = DType::kI16};
    const Walk walk = make_walk(route.what, arrays, Walk::Order::kFree);
    ByteExtent expected;
    bool first = true;
    for (const Atom& atom : plainly(route)) {
      expected.begin = first ? atom.src : std::min(expected.begin, atom.src);
      expected.end = first ? atom.src + 2 : std::max(expected.end, atom.src + 2);
      first = false;
    }
    EXPECT_EQ(walk.extent(kSource, 2).begin, expected.begin);
    EXPECT_EQ(walk.extent(kSource, 2).end, expected.end);
  }
}

// The number of blocks that a walk yields decides its speed.
size_t blocks_of(const Shape& shape, const Region& region, const Region& src, const Region& dst, Walk::Order order,
                 bool image) {
  const RouteRegion what{.shape = shape, .dtype = DType::kF32, .region = region};
  const LocalArray from{src, byte_strides(DType::kF32, src.extents())};
  const LocalArray to{dst, byte_strides(DType::kF32, dst.extents())};
  const Walk walk = make_walk(what, {.src = &from, .dst = &to, .dst_dtype = DType::kF32, .image = image}, order);
  size_t blocks = 0;
  walk.visit(0, walk.atoms(), [&](const Block&) { ++blocks; });
  return blocks;
}

TEST(Walk, FoldsWhatIsRegular) {
  const Shape shape{64, 32, 48};
  const Region whole = Region::full(shape);
  EXPECT_EQ(blocks_of(shape, whole, whole, whole, Walk::Order::kRowMajor, true), 1u);
  const Region columns({IntervalSet({0, 64}), IntervalSet({0, 32}), IntervalSet({0, 24})});
  EXPECT_EQ(blocks_of(shape, columns, whole, columns, Walk::Order::kRowMajor, true), 1u);
  std::vector<Interval> every_other;
  for (Index i = 0; i < 64; i += 2) every_other.push_back({i, i + 1});
  const Region strided({IntervalSet::of_sorted(every_other), IntervalSet({0, 32}), IntervalSet({0, 48})});
  EXPECT_EQ(blocks_of(shape, strided, whole, strided, Walk::Order::kRowMajor, true), 1u);
  EXPECT_EQ(blocks_of(shape, strided, strided, strided, Walk::Order::kRowMajor, false), 1u);
  const Region few({IntervalSet({0, 64}), IntervalSet({0, 2}), IntervalSet({0, 24})});
  EXPECT_EQ(blocks_of(shape, few, whole, few, Walk::Order::kRowMajor, false), 64u);
  EXPECT_EQ(blocks_of(shape, few, whole, few, Walk::Order::kFree, false), 2u);
}

TEST(ByteStrides, OfF4RowsOfOddLengthArePartOfTheDimThatIsPaired) {
  EXPECT_EQ(byte_strides(DType::kF4, Shape{3, 8}), (std::vector<Index>{4, 1}));
  EXPECT_EQ(byte_strides(DType::kF4, Shape{2, 3}), (std::vector<Index>{1, 0}));
  EXPECT_EQ(byte_strides(DType::kF4, Shape{4, 1}), (std::vector<Index>{1, 0}));
  EXPECT_EQ(byte_strides(DType::kF4, Shape{5, 2, 3}, std::vector<Index>{10, 3, 1}), (std::vector<Index>{5, 1, 0}));
  const ByteExtent padded = extent_of(DType::kF4, Shape{5, 2, 3}, std::vector<Index>{5, 1, 0});
  EXPECT_EQ(padded.end, 4 * 5 + 3);
}

TEST(Walk, OfF4CutsRowsOfOddLengthInPairs) {
  const Shape shape{2, 4, 3};
  const LocalArray whole{Region::full(shape), byte_strides(DType::kF4, shape)};
  const auto walk_of = [&](const Interval& rows, const Interval& columns) {
    const Region region({IntervalSet({0, 2}), IntervalSet(rows), IntervalSet(columns)});
    return make_walk({.shape = shape, .dtype = DType::kF4, .region = region},
                     {.src = &whole, .dst_dtype = DType::kF4, .image = true}, Walk::Order::kRowMajor);
  };
  EXPECT_EQ(walk_of({0, 4}, {0, 3}).atoms(), 12);
  const std::vector<Atom> lower{{3, 0, 3}, {4, 1, 4}, {5, 2, 5}, {9, 3, 9}, {10, 4, 10}, {11, 5, 11}};
  EXPECT_EQ(walked(walk_of({2, 4}, {0, 3}), 0, 6, 1), lower);
  EXPECT_THROW(walk_of({1, 3}, {0, 3}), Error);
  EXPECT_THROW(walk_of({0, 4}, {0, 2}), Error);
}

TEST(ByteStrides, RefuseF4ThatIsCutInsideAByte) {
  EXPECT_THROW(byte_strides(DType::kF4, Shape{3, 7}), Error);
  EXPECT_THROW(byte_strides(DType::kF4, Shape{2, 3}, std::vector<Index>{4, 1}), Error);
  EXPECT_THROW(byte_strides(DType::kF4, Shape{3, 8}, std::vector<Index>{8, 2}), Error);
  const RouteRegion odd{.shape = {8}, .dtype = DType::kF4, .region = Region({IntervalSet({1, 4})})};
  EXPECT_THROW(make_walk(odd, {.dst_dtype = DType::kF4}, Walk::Order::kRowMajor), Error);
}

TEST(ByteStrides, AnExtentBeyondAnyMemoryIsRefused) {
  EXPECT_THROW(extent_of(DType::kF32, Shape{1000}, std::vector<Index>{INT64_MAX / 100}), Error);
  EXPECT_THROW(byte_strides(DType::kF64, Shape{2}, std::vector<Index>{INT64_MAX / 2}), Error);
  const ByteExtent reversed = extent_of(DType::kF32, Shape{10, 2}, std::vector<Index>{-8, 4});
  EXPECT_EQ(reversed.begin, -72);
  EXPECT_EQ(reversed.end, 8);
}

}  // namespace
}  // namespace tessera
