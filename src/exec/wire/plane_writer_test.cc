#include "exec/wire/plane_writer.h"

#include <gtest/gtest.h>

#include <thread>

#include "exec/wire/wire_testing.h"

namespace tessera {
namespace {

using exec_testing::for_each_element;
using exec_testing::pick;
using exec_testing::Random;
using exec_testing::random_regions;
using exec_testing::WireReference;
using exec_testing::WireTensor;

// The piece that a sender would have sent.
std::vector<std::byte> piece_of(const WirePiece& piece, const WireReference& whole) {
  std::vector<std::byte> data(static_cast<size_t>(piece.bytes()));
  const BlockWalk& walk = piece.walk();
  const bool packed = whole.format().packed();
  walk.for_each_box(0, walk.all_bands(), [&](const BlockBox& box) {
    const Index matrix = piece.tensor_matrix(box.matrix);
    for (Index r = 0; r < box.rows.size(); ++r) {
      std::byte* row = data.data() + piece.codes(box) + r * piece.row_bytes();
      for (Index c = 0; c < box.columns.size(); ++c) {
        const std::byte code{whole.code(matrix, box.rows.begin + r, box.columns.begin + c)};
        const Index at = c + (piece.odd(box) ? 1 : 0);
        if (packed)
          row[at / 2] |= code << (at % 2 * 4);
        else
          row[at] = code;
      }
    }
  });
  for (Index m = 0; m < walk.matrices(); ++m) {
    const Index matrix = piece.tensor_matrix(m);
    const float amax = whole.amax(matrix);
    if (needs_amax(whole.format().spec.format)) std::memcpy(data.data() + piece.amax(m), &amax, sizeof(amax));
    Index row = 0;
    for (const Interval& rows : walk.block_rows().intervals())
      for (Index br = rows.begin; br < rows.end; ++br, ++row) {
        Index column = 0;
        for (const Interval& columns : walk.block_columns().intervals())
          for (Index bc = columns.begin; bc < columns.end; ++bc, ++column)
            std::memcpy(data.data() + piece.scale(m, row, column), whole.scale(matrix, br, bc),
                        static_cast<size_t>(whole.format().scale_bytes()));
      }
  }
  return data;
}

// [0, n) without some of its blocks, except for the last one.
IntervalSet random_blocks(Random& random, Index n, Index block) {
  std::vector<Interval> kept;
  for (Index at = 0; at < n; at += block) {
    const Index end = std::min(at + block, n);
    if (end < n && pick(random, 0, 2) == 0) continue;
    if (!kept.empty() && kept.back().end == at)
      kept.back().end = end;
    else
      kept.push_back({at, end});
  }
  return IntervalSet::of_sorted(kept);
}

// The expected planes of what one rank holds, one after another.
struct ExpectedPlanes {
  std::vector<std::byte> codes, scales, amaxes;

  ExpectedPlanes(const WireReference& whole, const WireTensor& tensor, const Region& held, bool transposed) {
    const codec::BlockFormat& format = whole.format();
    const Shape extents = held.extents();
    const Index rows = extents[extents.size() - 2];
    const Index columns = extents.back();
    const Index along = transposed ? rows : columns;
    const auto up = [](Index n, Index block) { return (n + block - 1) / block; };
    const Index block_lines = format.packed() ? 1 : transposed ? format.block_columns : format.block_rows;
    const Index block_along = transposed ? format.block_rows : format.block_columns;
    const Index scale_row = up(along, block_along);
    const Index scale_matrix = scale_row * up(transposed ? columns : rows, block_lines);
    Index matrices = 1;
    for (size_t d = 0; d + 2 < extents.size(); ++d) matrices *= extents[d];
    codes.resize(static_cast<size_t>(matrices * rows * columns / (format.packed() ? 2 : 1)));
    scales.resize(static_cast<size_t>(matrices * scale_matrix * format.scale_bytes()));
    Index linear = 0;
    for_each_element(held, [&](const std::vector<Index>& at) {
      const Index matrix = linear / (rows * columns);
      const Index row = linear / columns % rows;
      const Index column = linear % columns;
      const Index line = transposed ? column : row;
      const Index place = transposed ? row : column;
      const Index code = matrix * rows * columns + line * along + place;
      const std::byte value{whole.code(tensor.matrix_of(at), at[at.size() - 2], at.back())};
      if (format.packed())
        codes[static_cast<size_t>(code / 2)] |= value << (code % 2 * 4);
      else
        codes[static_cast<size_t>(code)] = value;
      const Index scale = matrix * scale_matrix + line / block_lines * scale_row + place / block_along;
      std::memcpy(
          scales.data() + scale * format.scale_bytes(),
          whole.scale(tensor.matrix_of(at), at[at.size() - 2] / format.block_rows, at.back() / format.block_columns),
          static_cast<size_t>(format.scale_bytes()));
      if (row == 0 && column == 0 && needs_amax(format.spec.format)) {
        const float amax = whole.amax(tensor.matrix_of(at));
        const auto* bytes = reinterpret_cast<const std::byte*>(&amax);
        amaxes.insert(amaxes.end(), bytes, bytes + sizeof(amax));
      }
      ++linear;
    });
  }
};

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
      const auto held_along = [&](Index n, Index block) {
        return random_blocks(random, n, format.one_scale() ? pick(random, 1, n) : block);
      };
      const Region held({random_blocks(random, matrices, 1), held_along(rows, format.block_rows),
                         held_along(columns, format.block_columns)});
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
