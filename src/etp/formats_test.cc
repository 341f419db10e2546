// A weight that ranks quantise by their rows and then gather has the bits of one that is quantised whole: in every
// format, by rows and by columns, whatever the number of ranks and rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "base/mutation.h"
#include "codec/simd/cast.h"
#include "collective/group.h"
#include "etp/etp_testing.h"
#include "etp/schedule/weight_format.h"

namespace tessera::etp {
namespace {

using Floats = std::vector<float>;

constexpr int64_t kColumns = 64;
constexpr int64_t kRowCounts[] = {1, 15, 40, 129, 300};

// Magnitudes differ within a block and from block to block, so that neither a scale of other rows nor a local amax goes
// unnoticed.
float value_at(int64_t row, int64_t column) {
  const auto drawn = static_cast<uint32_t>(row * 2654435761 + column * 40503 + 12345) % 2003;
  return (static_cast<float>(drawn) - 1001) * std::exp2(static_cast<float>((row * 7 + column) % 19 - row / 16) - 6);
}

Floats values_of(const RowRange& rows) {
  Floats values;
  for (int64_t row = rows.begin; row < rows.end; ++row)
    for (int64_t column = 0; column < kColumns; ++column) values.push_back(value_at(row, column));
  return values;
}

float amax_of(const Floats& values) {
  float amax = 0;
  for (const float value : values) amax = std::max(amax, std::abs(value));
  return amax;
}

// These rows, quantised by themselves and read again.
Floats through(const WeightFormat& format, Plane plane, const RowRange& rows, float amax) {
  Floats values = values_of(rows);
  if (!format.quantised()) {
    std::vector<std::byte> cast(values.size() * 4);
    cast_row(DType::kF32, format.dtype())(values.data(), cast.data(), values.size());
    cast_row(format.dtype(), DType::kF32)(cast.data(), values.data(), values.size());
    return values;
  }
  const QuantSpec spec = format.spec();
  const QuantizedLayout layout = quantized_layout(spec, format.planes(), 1, rows.size(), kColumns);
  std::vector<std::byte> bytes(static_cast<size_t>(layout.bytes));
  const auto memory = [&](const std::optional<QuantizedLayout::Place>& place) -> PlaneMemory {
    if (!place) return {};
    return {.codes = bytes.data() + place->codes,
            .code_stride = place->shape.code_row_bytes(),
            .scales = bytes.data() + place->scales,
            .scale_stride = place->shape.scale_row_bytes()};
  };
  const Planes planes{.row = memory(layout.row), .column = memory(layout.column)};
  quantize(
      {.data = values.data(), .dtype = DType::kF32, .rows = rows.size(), .columns = kColumns, .row_stride = kColumns},
      spec, {.row = amax, .column = amax}, planes);
  const PlaneMemory& from = plane == Plane::kRow ? planes.row : planes.column;
  dequantize(
      spec, plane, {from.codes, from.code_stride, from.scales, from.scale_stride}, amax,
      {.data = values.data(), .dtype = DType::kF32, .rows = rows.size(), .columns = kColumns, .row_stride = kColumns});
  return values;
}

// How many elements of what two ranks or more gather differ from the whole weight, quantised.
int64_t differences(const WeightFormat& format, int ranks, int64_t rows) {
  std::atomic<int64_t> differ = 0;
  const float amax = amax_of(values_of({0, rows}));
  run_ranks(ranks, [&](const ShardGroup& group) {
    Runtime runtime(group, {.prefetch = PrefetchMode::kOff, .check = true});
    const WeightId w = runtime.add({.name = "w",
                                    .rows = rows,
                                    .columns = kColumns,
                                    .format = std::string(to_string(format)),
                                    .compute = DType::kF32});
    if (const Floats own = values_of(runtime.rows(w)); !own.empty())
      std::memcpy(runtime.shard(w), own.data(), own.size() * sizeof(float));
    runtime.start();
    for (const Phase phase : {Phase::kForward, Phase::kBackward}) {
      const Plane plane = format.gathered(phase == Phase::kForward ? Plane::kRow : Plane::kColumn);
      const Floats whole = through(format, plane, {0, rows}, amax);
      const FullWeight full = runtime.acquire(w, phase);
      const auto* const found = static_cast<const float*>(full.data());
      for (size_t i = 0; i < whole.size(); ++i) differ += std::memcmp(&found[i], &whole[i], sizeof(float)) != 0 ? 1 : 0;
    }
    group.impl()->barrier("the end");
  });
  return differ;
}

TEST(FormatsTest, QuantisedThenGatheredIsGatheredThenQuantised) {
  for (const WeightFormat& format : WeightFormat::all())
    for (int ranks = 1; ranks <= 4; ++ranks)
      for (const int64_t rows : kRowCounts)
        EXPECT_EQ(differences(format, ranks, rows), 0)
            << to_string(format) << ", " << ranks << " ranks, " << rows << " rows";
}

TEST(FormatsTest, AnAmaxOfOneRanksRowsGivesOtherBits) {
  mutation().store(Mutation::kLocalAmax);
  for (const WeightFormat& format : WeightFormat::all()) {
    const bool found = differences(format, 2, 129) > 0;
    EXPECT_EQ(found, format.needs_amax()) << to_string(format);
  }
  mutation().store(Mutation::kNone);
}

// What ranks would do whose shards begin at multiples of `alignment`.
bool same_in_pieces(const WeightFormat& format, Plane plane, int64_t alignment) {
  constexpr int64_t kRows = 300;
  const float amax = amax_of(values_of({0, kRows}));
  Floats pieces;
  const int64_t cut = alignment * 3;
  for (const RowRange rows : {RowRange{0, cut}, RowRange{cut, kRows}}) {
    const Floats piece = through(format, plane, rows, amax);
    pieces.insert(pieces.end(), piece.begin(), piece.end());
  }
  const Floats whole = through(format, plane, {0, kRows}, amax);
  return std::memcmp(pieces.data(), whole.data(), whole.size() * sizeof(float)) == 0;
}

TEST(FormatsTest, ShardsThatBeginInsideOfABlockGiveOtherBits) {
  struct Blocks {
    const char* format;
    Plane plane;
    int64_t rows;  // of a block
  };
  const Blocks all[] = {
      {"mxfp8", Plane::kColumn, 32}, {"nvfp4", Plane::kRow, 16}, {"fp8_block_128x128", Plane::kRow, 128}};
  for (const Blocks& blocks : all) {
    const WeightFormat format = WeightFormat::parse(blocks.format);
    ASSERT_GE(format.alignment(), blocks.rows);
    if (blocks.rows * 3 <= 300) {
      EXPECT_TRUE(same_in_pieces(format, blocks.plane, blocks.rows)) << blocks.format;
    }
    EXPECT_FALSE(same_in_pieces(format, blocks.plane, blocks.rows / 2)) << blocks.format;
  }
}

}  // namespace
}  // namespace tessera::etp
