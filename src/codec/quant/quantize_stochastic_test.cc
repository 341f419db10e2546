// Stochastic rounding: which random byte an element gets, and its effect.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <utility>

#include "codec/float/philox.h"
#include "codec/quant/quantize_testing.h"

namespace tessera {
namespace {

QuantSpec stochastic_spec(NvScaling scaling, uint64_t seed) {
  QuantSpec spec = nvfp4_spec(scaling);
  spec.rounding = Rounding::kStochastic;
  spec.seed = seed;
  return spec;
}

// The known answers of Random123 (kat_vectors, philox4x32 10).
TEST(PhiloxTest, GivesThePublishedNumbers) {
  struct Known {
    oracle::Words4 counter;
    std::array<uint32_t, 2> key;
    oracle::Words4 words;
  };
  constexpr uint32_t kOnes = 0xFFFFFFFF;
  constexpr Known kKnown[] = {
      {{0, 0, 0, 0}, {0, 0}, {0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8}},
      {{kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}, {0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD}},
      {{0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344},
       {0xA4093822, 0x299F31D0},
       {0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1}},
  };
  for (const Known& known : kKnown) {
    EXPECT_EQ(oracle::philox(known.counter, known.key), known.words);
    EXPECT_EQ(codec::philox(known.counter, known.key[0] | uint64_t{known.key[1]} << 32), known.words);
  }
}

class StochasticTest : public EveryKernelTest {};

// The bytes of the first of those vectors, as seen in the first 16 elements of a plane: with y = .5 - f / 512, bytes
// from f on round up to .5; with f = 256 - byte the byte itself does, with one more it does not.
TEST_P(StochasticTest, TheFirstElementsDrawThePublishedBytes) {
  constexpr uint8_t kBytes[16] = {0xD5, 0xE8, 0x27, 0x66, 0x8D, 0xC5, 0x69, 0xE1,
                                  0x4C, 0xAC, 0x57, 0xBC, 0xD8, 0xDB, 0x00, 0x9B};
  const QuantSpec spec = stochastic_spec(NvScaling::k16x16, 0);
  for (const int less : {0, 1}) {
    TestMatrix m(DType::kF32, 2, 16);  // the second row fixes the scale at 1
    m.fill(6);
    for (int i = 0; i < 16; ++i) m.set(0, i, static_cast<float>(256 - kBytes[i] - less) / 512);
    const OraclePlane got = quantized(m.view(), spec, Plane::kRow, 2688);
    EXPECT_THAT(got.scales, testing::Each(std::byte{0x38}));
    const std::byte pair{static_cast<uint8_t>(less == 0 ? 0x11 : 0x00)};
    EXPECT_EQ(std::vector(got.codes.begin(), got.codes.begin() + 8), std::vector(8, pair));
  }
}

TEST_P(StochasticTest, EveryElementFollowsTheFormula) {
  constexpr std::pair<int64_t, int64_t> kShapes[] = {{2, 2}, {16, 16}, {34, 50}, {6, 300}, {130, 258}, {270, 18}};
  for (const auto& [rows, columns] : kShapes) {
    for (const DType dtype : kQuantizable) {
      const TestMatrix m = random_matrix(dtype, rows, columns, 21, {3, 1});
      const OracleMatrix values = m.oracle();
      const float amax = oracle::amax(values);
      for (const NvScaling scaling : {NvScaling::k1x16, NvScaling::k16x16}) {
        const QuantSpec spec = stochastic_spec(scaling, 0x123456789ABCDEF0);
        for (const Plane plane : kPlanes) {
          EXPECT_EQ(difference(quantized(m.view(), spec, plane, amax), oracle_quantize(values, spec, plane, amax)), "")
              << describe(spec, plane, dtype, rows, columns);
        }
      }
    }
  }
}

TEST_P(StochasticTest, EveryTailAtAnyAddress) {
  const QuantSpec spec = stochastic_spec(NvScaling::k1x16, 99);
  for (int64_t columns = 2; columns < 560; columns += columns < 100 ? 2 : 22) {
    const auto off = static_cast<size_t>(columns / 2);
    const TestMatrix m = random_matrix(DType::kBF16, 3, columns, 22, {columns % 5, off % 4});
    TestPlane to(spec, Plane::kRow, 3, columns, {columns % 3, off % 5}, {1, off % 3});
    quantize(m.view(), spec, {1, 1}, {to.memory(), {}});
    EXPECT_EQ(difference(to.get(), oracle_quantize(m.oracle(), spec, Plane::kRow, 1)), "") << columns;
    EXPECT_TRUE(to.intact()) << columns;
  }
}

TEST_P(StochasticTest, EveryValueOf16Bits) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    TestMatrix m(dtype, 256, 256);
    for (uint32_t code = 0; code < 65536; ++code) m.set_bits(code / 256, code % 256, code);
    const QuantSpec spec = propagating(stochastic_spec(NvScaling::k1x16, 5));
    for (const float amax : {1.0F, std::numeric_limits<float>::infinity()}) {
      EXPECT_EQ(difference(quantized(m.view(), spec, Plane::kRow, amax),
                           oracle_quantize(m.oracle(), spec, Plane::kRow, amax)),
                "")
          << to_string(dtype) << ", amax " << amax;
    }
  }
}

// With a scale of 1, in steps of 1/256 from one code's value to the next: the mean over many draws is the value.
TEST_P(StochasticTest, TheMeanIsTheValue) {
  constexpr int64_t kColumns = 4096;
  const float starts[] = {0, .5F, 1, 1.5F, 2, 3, 4};
  TestMatrix m(DType::kF32, 7 * 4 * 2, kColumns);
  int64_t row = 0;
  for (const float start : starts) {
    for (const int part : {0, 1, 100, 255}) {
      for (const int sign : {1, -1}) {
        const float y = start + oracle::e2m1_step(start) * static_cast<float>(part) / 256;
        for (int64_t c = 0; c < kColumns; ++c) m.set(row, c, static_cast<float>(sign) * (c % 16 == 0 ? 6 : y));
        ++row;
      }
    }
  }
  const QuantSpec spec = stochastic_spec(NvScaling::k1x16, 77);
  const OraclePlane got = quantized(m.view(), spec, Plane::kRow, 2688);
  EXPECT_THAT(got.scales, testing::Each(std::byte{0x38}));
  const TestMatrix back = dequantized(got, spec, Plane::kRow, 2688, DType::kF32, m.rows(), kColumns);
  for (int64_t r = 0; r < m.rows(); ++r) {
    const double y = m.get(r, 1);
    const double step = oracle::e2m1_step(static_cast<float>(std::fabs(y)));
    double sum = 0;
    int64_t n = 0;
    for (int64_t c = 0; c < kColumns; ++c) {
      if (c % 16 == 0) continue;
      const double q = back.get(r, c);
      EXPECT_LT(std::fabs(q - y), step) << "one of the two neighbours";
      sum += q;
      ++n;
    }
    const double p = std::fmod(std::fabs(y), step) / step;
    const double sigma = step * std::sqrt(p * (1 - p) / static_cast<double>(n));
    EXPECT_NEAR(sum / static_cast<double>(n), y, 4.5 * sigma) << "row " << r;
  }
}

TEST_P(StochasticTest, ShardsDrawAsTheWholeDoes) {
  constexpr int64_t kRows = 96;
  constexpr int64_t kColumns = 160;
  const TestMatrix m = random_matrix(DType::kBF16, kRows, kColumns, 23);
  for (const NvScaling scaling : {NvScaling::k1x16, NvScaling::k16x16}) {
    const QuantSpec spec = stochastic_spec(scaling, 1 + (uint64_t{1} << 40));
    for (const Plane plane : kPlanes) {
      TestPlane whole(spec, plane, kRows, kColumns);
      TestPlane parts(spec, plane, kRows, kColumns);
      const PlaneAmax amax{2, 2};
      quantize(m.view(), spec, amax, one_plane(plane, whole.memory()));
      TestPlane unplaced(spec, plane, kRows, kColumns);
      for (const auto& [row, rows] : {std::pair{0, 16}, std::pair{16, 48}, std::pair{64, 32}}) {
        for (const auto& [column, columns] : {std::pair{0, 32}, std::pair{32, 112}, std::pair{144, 16}}) {
          const int64_t r = plane == Plane::kRow ? row : column;
          const int64_t c = plane == Plane::kRow ? column : row;
          const auto place = [&](PlaneMemory to) {
            to.codes += r * to.code_stride + c / 2;
            to.scales += r * to.scale_stride + c / 16;
            return one_plane(plane, to);
          };
          const MatrixView shard = m.part(row, rows, column, columns);
          quantize(shard, spec, amax, place(parts.memory()), {}, {row, column, kRows, kColumns, 0});
          quantize(shard, spec, amax, place(unplaced.memory()));
        }
      }
      EXPECT_EQ(difference(parts.get(), whole.get()), "") << describe(spec, plane, m.dtype(), kRows, kColumns);
      EXPECT_EQ(unplaced.get().scales, whole.get().scales);
      EXPECT_NE(unplaced.get().codes, whole.get().codes) << "shards that do not know their place draw alike";
    }
  }
}

// A matrix of a stack continues the random numbers of the one before; the counter has 64 bits for it.
TEST_P(StochasticTest, AMatrixOfAStackDrawsWhereItLies) {
  const TestMatrix m = random_matrix(DType::kF32, 16, 20, 24);
  const QuantSpec spec = stochastic_spec(NvScaling::k1x16, 31);
  for (const int64_t first : {int64_t{320}, int64_t{7}, (int64_t{16} << 32) - 40, int64_t{1} << 50}) {
    const Origin origin{.first_element = first};
    for (const Plane plane : kPlanes) {
      EXPECT_EQ(difference(quantized(m.view(), spec, plane, 1, {}, origin),
                           oracle_quantize(m.oracle(), spec, plane, 1, origin)),
                "")
          << first;
    }
  }
  EXPECT_EQ(oracle::draw(31, Plane::kRow, 320 + 5), codec::random_byte(31, 0, 320 + 5));
}

TEST_P(StochasticTest, SeedsAndPlanesDrawDifferently) {
  TestMatrix m(DType::kF32, 32, 32);
  m.fill(.25F);
  for (int64_t i = 0; i < 32; ++i) m.set(i, i % 16, 6);
  for (int64_t i = 0; i < 32; ++i) m.set(i, 16 + i % 16, 6);
  const QuantSpec spec = stochastic_spec(NvScaling::k16x16, 1);
  const auto row = quantized(m.view(), spec, Plane::kRow, 2688);
  EXPECT_EQ(row, quantized(m.view(), spec, Plane::kRow, 2688));
  EXPECT_NE(row, quantized(m.view(), stochastic_spec(NvScaling::k16x16, 2), Plane::kRow, 2688));
  EXPECT_NE(row, quantized(m.view(), stochastic_spec(NvScaling::k16x16, 1 + (uint64_t{1} << 32)), Plane::kRow, 2688));
  // The matrix is symmetric, but the planes are not.
  EXPECT_NE(row, quantized(m.view(), spec, Plane::kColumn, 2688));
}

INSTANTIATE_TEST_SUITE_P(Kernels, StochasticTest, every_kernel(), kernel_name);

}  // namespace
}  // namespace tessera
