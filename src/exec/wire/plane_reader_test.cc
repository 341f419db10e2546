#include "exec/wire/plane_reader.h"

#include <gtest/gtest.h>

#include "exec/wire/plane_testing.h"

namespace tessera {
namespace {

using exec_testing::ExpectedPlanes;
using exec_testing::pick;
using exec_testing::piece_of;
using exec_testing::Random;
using exec_testing::random_held;
using exec_testing::random_regions;
using exec_testing::WireReference;
using exec_testing::WireTensor;

PlaneSource source_of(const ExpectedPlanes& planes, const Region& held, bool transposed) {
  PlaneSource source{.transposed = transposed, .held = held};
  const Shape extents = held.extents();
  const size_t matrices = static_cast<size_t>(extents[0]);
  for (size_t m = 0; m < matrices; ++m)
    source.matrices.push_back({.codes = planes.codes.data() + m * (planes.codes.size() / matrices),
                               .scales = planes.scales.data() + m * (planes.scales.size() / matrices),
                               .amax = planes.amaxes.empty() ? nullptr : planes.amaxes.data() + m * sizeof(float)});
  return source;
}

// In steps of some bands, over memory full of `fill`.
std::vector<std::byte> read_piece(Random& random, const WirePiece& piece, const PlaneSource& source, std::byte fill) {
  std::vector<std::byte> data(static_cast<size_t>(piece.bytes()), fill);
  const PlaneReader reader(piece, source);
  const Index step = pick(random, 1, 40);
  Index elements = 0;
  for (Index band = 0; band < piece.walk().all_bands(); band += step)
    elements += reader.read(piece, source.matrices, band, std::min(piece.walk().all_bands(), band + step), data.data());
  EXPECT_EQ(elements, piece.walk().elements());
  return data;
}

TEST(PlaneReader, PiecesOfAnyCutsAreThoseOfWhatIsQuantised) {
  Random random(81);
  for (int i = 0; i < 20; ++i) {
    for (const Format name : all_formats()) {
      const codec::BlockFormat format(name);
      const WireReference whole(random, format, DType::kF32, pick(random, 1, 3), 2 * pick(random, 1, 100),
                                2 * pick(random, 1, 200));
      const WireTensor tensor{.whole = &whole, .shape = whole.shape()};
      const Region held = random_held(random, format, tensor.shape);
      for (const bool transposed : {false, true}) {
        const ExpectedPlanes planes(whole, tensor, held, transposed);
        const PlaneSource source = source_of(planes, held, transposed);
        for (const Region& region : random_regions(random, tensor.shape)) {
          const WirePiece piece(tensor.region(region.intersect(held)));
          if (piece.what().region.empty()) continue;
          const std::vector<std::byte> expected = piece_of(piece, whole);
          const std::string what = fmt::format("{} of {} in {}{}", piece.what().region.to_string(), to_string(name),
                                               held.to_string(), transposed ? ", transposed" : "");
          EXPECT_EQ(read_piece(random, piece, source, std::byte{0}), expected) << what;
          // Codes beside a region are 0, whatever was there.
          const std::vector<std::byte> over = read_piece(random, piece, source, std::byte{0xFF});
          EXPECT_TRUE(
              std::equal(over.begin() + piece.code_section(), over.end(), expected.begin() + piece.code_section()))
              << what;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera
