#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <numeric>

#include "codec/quant/quantize_testing.h"
#include "tessera/error.h"

namespace tessera {
namespace {

int64_t round_up(int64_t n, int64_t to) {
  return oracle::ceil_div(n, to) * to;
}

// [rows, columns] of scales in a GEMM's order, by the formula for tiles.
std::vector<std::byte> tiled(const std::vector<std::byte>& scales, int64_t rows, int64_t columns) {
  std::vector<std::byte> bytes(static_cast<size_t>(round_up(rows, 128) * round_up(columns, 4)));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t offset =
          ((r / 128 * oracle::ceil_div(columns, 4) + c / 4) * 32 + r % 32) * 16 + r % 128 / 32 * 4 + c % 4;
      bytes[static_cast<size_t>(offset)] = scales[static_cast<size_t>(r * columns + c)];
    }
  }
  return bytes;
}

std::vector<std::byte> expected_gemm(const QuantSpec& spec, Plane plane, const std::vector<std::byte>& scales,
                                     int64_t rows, int64_t columns) {
  if (oracle::block_of(spec).rows == 0) return scales;
  if (spec.format == Format::kNvfp4) return tiled(scales, rows, columns);
  if (oracle::is_mxfp8(spec.format)) {
    if (plane == Plane::kRow) return tiled(scales, rows, columns);
    return tiled(oracle::transpose_bytes(scales, rows, columns), columns, rows);
  }
  std::vector<std::byte> padded(static_cast<size_t>(rows * round_up(columns, 4) * 4));
  for (int64_t r = 0; r < rows; ++r)
    std::copy_n(scales.begin() + r * columns * 4, columns * 4, padded.begin() + r * round_up(columns, 4) * 4);
  return padded;
}

TEST(GemmScalesTest, GoWhereTheFormulaSaysWithZerosAround) {
  for (const QuantSpec& spec : every_spec()) {
    for (const int64_t rows : {2, 16, 96, 128, 130, 258, 400}) {
      for (const int64_t columns : {2, 32, 62, 64, 66, 128, 160, 514, 1100}) {
        for (const Plane plane : kPlanes) {
          SCOPED_TRACE(describe(spec, plane, DType::kF32, rows, columns));
          TestPlane from(spec, plane, rows, columns, {}, {rows % 3, static_cast<size_t>(columns % 5)});
          const PlaneShape& shape = from.shape();
          const OraclePlane plane_bytes{random_bytes(static_cast<size_t>(shape.code_bytes()), 1),
                                        random_bytes(static_cast<size_t>(shape.scale_bytes()), 2)};
          from.put(plane_bytes);
          GuardedBytes to(static_cast<size_t>(shape.gemm_bytes()), static_cast<size_t>(rows % 7));
          const PlaneMemory memory = from.memory();
          gemm_scales(spec, plane, rows, columns, memory.scales, memory.scale_stride, to.data());
          EXPECT_EQ(difference({to.data(), to.data() + to.size()},
                               expected_gemm(spec, plane, plane_bytes.scales, shape.scale_rows, shape.scale_columns)),
                    "");
          EXPECT_TRUE(to.intact());
        }
      }
    }
  }
}

// The first scales of the next tile down and of the next one to the right, computed by hand.
TEST(GemmScalesTest, ATileHasFiveHundredAndTwelveBytes) {
  const QuantSpec spec = spec_of(Format::kMxfp8);
  constexpr int64_t kRows = 129;
  constexpr int64_t kColumns = 5 * 32;
  std::vector<std::byte> scales(kRows * 5);
  const std::map<std::pair<int64_t, int64_t>, size_t> places{
      {{0, 0}, 0},   {{0, 1}, 1},     {{0, 3}, 3},   {{1, 0}, 16},  {{31, 0}, 496},   {{32, 0}, 4},
      {{64, 2}, 10}, {{127, 3}, 511}, {{0, 4}, 512}, {{1, 4}, 528}, {{128, 0}, 1024}, {{128, 4}, 1536}};
  for (const auto& [place, offset] : places) {
    std::ranges::fill(scales, std::byte{0});
    scales[static_cast<size_t>(place.first * 5 + place.second)] = std::byte{99};
    std::vector<std::byte> to(256 * 8, std::byte{7});
    gemm_scales(spec, Plane::kRow, kRows, kColumns, scales.data(), 5, to.data());
    EXPECT_EQ(to[offset], std::byte{99}) << place.first << ", " << place.second;
    EXPECT_EQ(std::ranges::count(to, std::byte{0}), 256 * 8 - 1);
  }
}

struct ShapeCase {
  QuantSpec spec;
  Plane plane;
  int64_t codes[2];
  int64_t scales[2];
  int64_t gemm[2];
};

TEST(PlaneShapeTest, OfAMatrixOf300By200) {
  const ShapeCase cases[] = {
      {spec_of(Format::kFp8E4M3), Plane::kRow, {300, 200}, {1, 1}, {1, 1}},
      {spec_of(Format::kFp8E5M2), Plane::kColumn, {200, 300}, {1, 1}, {1, 1}},
      {spec_of(Format::kFp8Block1x128), Plane::kRow, {300, 200}, {300, 2}, {300, 4}},
      {spec_of(Format::kFp8Block1x128), Plane::kColumn, {200, 300}, {200, 3}, {200, 4}},
      {spec_of(Format::kFp8Block128x128), Plane::kRow, {300, 200}, {3, 2}, {3, 4}},
      {spec_of(Format::kFp8Block128x128), Plane::kColumn, {200, 300}, {2, 3}, {2, 4}},
      {spec_of(Format::kMxfp8), Plane::kRow, {300, 200}, {300, 7}, {384, 8}},
      {spec_of(Format::kMxfp8E5M2), Plane::kColumn, {300, 200}, {10, 200}, {12, 256}},
      {nvfp4_spec(NvScaling::k1x16), Plane::kRow, {300, 200}, {300, 13}, {384, 16}},
      {nvfp4_spec(NvScaling::k16x16), Plane::kColumn, {200, 300}, {200, 19}, {256, 20}},
  };
  for (const ShapeCase& c : cases) {
    const PlaneShape shape = plane_shape(c.spec, c.plane, 300, 200);
    const bool nv = c.spec.format == Format::kNvfp4;
    EXPECT_THAT((std::array{shape.code_rows, shape.code_columns}), testing::ElementsAreArray(c.codes));
    EXPECT_THAT((std::array{shape.scale_rows, shape.scale_columns}), testing::ElementsAreArray(c.scales));
    EXPECT_THAT((std::array{shape.gemm_rows, shape.gemm_columns}), testing::ElementsAreArray(c.gemm));
    EXPECT_EQ(shape.code_dtype, nv ? DType::kF4 : oracle::is_e5m2(c.spec.format) ? DType::kF8E5M2 : DType::kF8E4M3);
    EXPECT_EQ(shape.scale_dtype, nv ? DType::kF8E4M3 : oracle::is_mxfp8(c.spec.format) ? DType::kF8E8M0 : DType::kF32);
    EXPECT_EQ(shape.code_bytes(), nv ? 30000 : 60000);
  }
}

TEST(PlaneShapeTest, BlocksOfEachPlaneInTheMatrixsDirections) {
  EXPECT_EQ(block_shape(spec_of(Format::kFp8E4M3), Plane::kRow), (BlockShape{0, 0}));
  EXPECT_EQ(block_shape(spec_of(Format::kFp8Block1x128), Plane::kColumn), (BlockShape{128, 1}));
  EXPECT_EQ(block_shape(spec_of(Format::kFp8Block128x128), Plane::kColumn), (BlockShape{128, 128}));
  EXPECT_EQ(block_shape(spec_of(Format::kMxfp8), Plane::kRow), (BlockShape{1, 32}));
  EXPECT_EQ(block_shape(spec_of(Format::kMxfp8), Plane::kColumn), (BlockShape{32, 1}));
  EXPECT_EQ(block_shape(nvfp4_spec(NvScaling::k1x16), Plane::kColumn), (BlockShape{16, 1}));
  EXPECT_EQ(block_shape(nvfp4_spec(NvScaling::k16x16), Plane::kRow), (BlockShape{16, 16}));
}

TEST(DeinterleaveTest, PutsRanksSideBySide) {
  for (const int64_t ranks : {1, 2, 5}) {
    for (const int64_t rows : {0, 1, 63, 130}) {
      for (const int64_t row_bytes : {0, 1, 8, 33}) {
        const auto from = random_bytes(static_cast<size_t>(ranks * rows * row_bytes), 3);
        GuardedBytes to(from.size(), 3);
        deinterleave_columns(from.data(), ranks, rows, row_bytes, to.data());
        size_t wrong = 0;
        for (int64_t i = 0; i < ranks * rows * row_bytes; ++i) {
          const int64_t byte = i % row_bytes;
          const int64_t row = i / row_bytes % rows;
          const int64_t rank = i / row_bytes / rows;
          wrong += to.data()[(row * ranks + rank) * row_bytes + byte] != from[static_cast<size_t>(i)];
        }
        EXPECT_EQ(wrong, 0U) << ranks << " ranks, " << rows << " rows of " << row_bytes;
        EXPECT_TRUE(to.intact());
      }
    }
  }
}

TEST(DeinterleaveTest, IsTheSameByAnyNumberOfThreads) {
  const auto from = random_bytes(4 * 1000 * 700, 4);
  std::vector<std::byte> one(from.size());
  deinterleave_columns(from.data(), 4, 1000, 700, one.data());
  for (const int threads : {2, 3, 0}) {
    std::vector<std::byte> to(from.size());
    deinterleave_columns(from.data(), 4, 1000, 700, to.data(), {threads});
    EXPECT_EQ(difference(to, one), "") << threads;
  }
}

TEST(DeinterleaveTest, RefusesSizesThatCannotBe) {
  EXPECT_THROW(deinterleave_columns(nullptr, 0, 1, 1, nullptr), Error);
  EXPECT_THROW(deinterleave_columns(nullptr, 1, -1, 1, nullptr), Error);
  EXPECT_THROW(deinterleave_columns(nullptr, 1, 1, -1, nullptr), Error);
}

}  // namespace
}  // namespace tessera
