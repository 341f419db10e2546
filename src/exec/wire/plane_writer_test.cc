#include "exec/wire/plane_writer.h"

#include <gtest/gtest.h>

#include <thread>

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

struct WrittenPlanes {
  std::vector<std::byte> codes, scales, amaxes;

  explicit WrittenPlanes(const ExpectedPlanes& like)
      : codes(like.codes.size(), std::byte{0xA5}),
        scales(like.scales.size(), std::byte{0xA5}),
        amaxes(like.amaxes.size(), std::byte{0xA5}) {}
  PlaneTarget target(bool transposed) {
    return {.transposed = transposed,
            .codes = codes.data(),
            .scales = scales.data(),
            .amaxes = amaxes.empty() ? nullptr : amaxes.data()};
  }
};

void expect_equal(const WrittenPlanes& written, const ExpectedPlanes& expected, const std::string& what) {
  EXPECT_EQ(written.codes, expected.codes) << what;
  EXPECT_EQ(written.scales, expected.scales) << what;
  EXPECT_EQ(written.amaxes, expected.amaxes) << what;
}

TEST(PlaneWriter, PiecesOfAnyCutsGiveThePlanesOfWhatIsHeld) {
  Random random(71);
  for (int i = 0; i < 30; ++i) {
    for (const Format name : all_formats()) {
      const codec::BlockFormat format(name);
      const Index rows = 2 * pick(random, 1, 100);
      const Index columns = 2 * pick(random, 1, 200);
      const Index matrices = pick(random, 1, 3);
      const WireReference whole(random, format, DType::kF32, matrices, rows, columns);
      const WireTensor tensor{.whole = &whole, .shape = {matrices, rows, columns}};
      const Region held = random_held(random, format, tensor.shape);
      const ExpectedPlanes upright(whole, tensor, held, false);
      const ExpectedPlanes transposed(whole, tensor, held, true);
      WrittenPlanes row(upright), column(transposed);
      const std::vector<PlaneTarget> targets{row.target(false), column.target(true)};

      std::vector<std::thread> threads;
      for (const Region& region : random_regions(random, tensor.shape)) {
        auto piece = std::make_shared<WirePiece>(tensor.region(region.intersect(held)));
        if (piece->what().region.empty()) continue;
        const Index step = pick(random, 1, 40);
        threads.emplace_back([&, piece, step] {
          const std::vector<std::byte> data = piece_of(*piece, whole);
          const PlaneWriter writer(piece, held, targets);
          int64_t read = 0;
          for (Index band = 0; band < piece->walk().all_bands(); band += step)
            read += writer.read(data.data(), band, std::min(piece->walk().all_bands(), band + step));
          EXPECT_EQ(read, piece->bytes());
        });
      }
      for (std::thread& thread : threads) thread.join();
      const std::string what = fmt::format("{} of {}", held.to_string(), to_string(name));
      expect_equal(row, upright, what);
      expect_equal(column, transposed, what);
    }
  }
}

// The result of quantize() for the same matrix.
TEST(PlaneWriter, BothPlanesAreThoseOfTheWholeTensorWhereOneIsTheOtherTransposed) {
  Random random(72);
  for (const Format name : all_formats()) {
    const codec::BlockFormat format(name);
    if (!column_is_transposed_row(format.spec)) continue;
    constexpr Index kRows = 150, kColumns = 278;
    const WireReference whole(random, format, DType::kF32, 1, kRows, kColumns);
    const WireTensor tensor{.whole = &whole, .shape = {kRows, kColumns}};
    const QuantizedLayout layout = quantized_layout(format.spec, {.row = true, .column = true}, 1, kRows, kColumns);
    std::vector<std::byte> expected(static_cast<size_t>(layout.bytes)), written(expected.size());
    const auto at = [](std::vector<std::byte>& block, const QuantizedLayout::Place& place) {
      return PlaneMemory{block.data() + place.codes, place.shape.code_row_bytes(), block.data() + place.scales,
                         place.shape.scale_row_bytes()};
    };
    quantize({whole.value(0, 0, 0), DType::kF32, kRows, kColumns, kColumns}, format.spec,
             {whole.amax(0), whole.amax(0)}, {at(expected, *layout.row), at(expected, *layout.column)});
    std::vector<PlaneTarget> targets;
    for (const auto& [place, transposed] : {std::pair(*layout.row, false), std::pair(*layout.column, true)}) {
      const float amax = whole.amax(0);
      std::memcpy(expected.data() + place.amaxes, &amax, needs_amax(name) ? sizeof(amax) : 0);
      targets.push_back({.transposed = transposed,
                         .codes = written.data() + place.codes,
                         .scales = written.data() + place.scales,
                         .amaxes = needs_amax(name) ? written.data() + place.amaxes : nullptr});
    }
    auto piece = std::make_shared<WirePiece>(tensor.region(Region::full(tensor.shape)));
    const std::vector<std::byte> data = piece_of(*piece, whole);
    PlaneWriter(piece, Region::full(tensor.shape), targets).read(data.data(), 0, piece->walk().all_bands());
    EXPECT_EQ(written, expected) << to_string(name);
  }
}

}  // namespace
}  // namespace tessera
