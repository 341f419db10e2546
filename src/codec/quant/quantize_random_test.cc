#include <gtest/gtest.h>

#include "codec/quant/quantize_testing.h"

namespace tessera {
namespace {

struct RandomSize {
  int64_t rows;
  int64_t columns;
};
// Smaller than, equal to and larger than the tiles that are processed at a time, with and without whole blocks.
constexpr RandomSize kRandomSizes[] = {{1, 2},     {2, 2},    {16, 16},   {32, 32},  {48, 80},   {128, 128},
                                       {130, 258}, {2, 4200}, {34, 1030}, {260, 70}, {140, 140}, {530, 18}};

// Both planes, and back again.
void expect_oracles_bytes(const TestMatrix& m, const OracleMatrix& values, const QuantSpec& spec) {
  const float amax = oracle::amax(values);
  for (const Plane plane : kPlanes) {
    if (!is_packable(spec, plane, m.rows(), m.columns())) continue;
    SCOPED_TRACE(describe(spec, plane, m.dtype(), m.rows(), m.columns()));
    const OraclePlane want = oracle_quantize(values, spec, plane, amax);
    const DType back_to = m.rows() * m.columns() < 5000 ? m.dtype() : DType::kF32;
    const OracleMatrix back = oracle_dequantize(want, spec, plane, amax, back_to, m.rows(), m.columns());
    with_every_kernel([&] {
      ASSERT_EQ(difference(quantized(m.view(), spec, plane, amax), want), "");
      ASSERT_EQ(difference(dequantized(want, spec, plane, amax, back_to, m.rows(), m.columns()), back), "");
    });
  }
}

class QuantizeRandomTest : public testing::TestWithParam<DType> {};

TEST_P(QuantizeRandomTest, EveryFormatGivesTheOraclesBytes) {
  for (const auto& [rows, columns] : kRandomSizes) {
    const TestMatrix m = random_matrix(GetParam(), rows, columns, static_cast<uint32_t>(rows * 7919 + columns));
    const OracleMatrix values = m.oracle();
    for (const QuantSpec& spec : every_spec()) {
      expect_oracles_bytes(m, values, spec);
      ASSERT_FALSE(HasFatalFailure());
    }
  }
}

// Multiples of a quarter: many ties.
TEST_P(QuantizeRandomTest, TiesGoToEvenCodesInEveryFormat) {
  TestMatrix m(GetParam(), 64, 256);
  std::mt19937 random(8);
  for (int64_t r = 0; r < m.rows(); ++r)
    for (int64_t c = 0; c < m.columns(); ++c) m.set(r, c, static_cast<float>(static_cast<int>(random() % 49) - 24) / 4);
  const OracleMatrix values = m.oracle();
  for (const QuantSpec& spec : every_spec()) {
    expect_oracles_bytes(m, values, spec);
    ASSERT_FALSE(HasFatalFailure());
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, QuantizeRandomTest, testing::ValuesIn(kQuantizable), dtype_name);

class QuantizeThreadsTest : public EveryKernelTest {};

TEST_P(QuantizeThreadsTest, AnyNumberOfThreadsGivesTheSameBytes) {
  const TestMatrix m = random_matrix(DType::kF32, 528, 1090, 3);  // enough for three
  for (QuantSpec spec : every_spec()) {
    if (spec.power_of_two) continue;
    if (spec.format == Format::kNvfp4 && spec.scaling == NvScaling::k1x16) spec.rounding = Rounding::kStochastic;
    TestPlane row(spec, Plane::kRow, m.rows(), m.columns());
    TestPlane column(spec, Plane::kColumn, m.rows(), m.columns());
    quantize(m.view(), spec, {1.5F, 1.5F}, {row.memory(), column.memory()}, {1});
    for (const int threads : {2, 3}) {
      TestPlane other_row(spec, Plane::kRow, m.rows(), m.columns());
      TestPlane other_column(spec, Plane::kColumn, m.rows(), m.columns());
      quantize(m.view(), spec, {1.5F, 1.5F}, {other_row.memory(), other_column.memory()}, {threads});
      EXPECT_EQ(difference(other_row.get(), row.get()), "") << describe(spec) << ", " << threads << " threads";
      EXPECT_EQ(difference(other_column.get(), column.get()), "") << describe(spec) << ", " << threads << " threads";
      EXPECT_TRUE(other_row.intact() && other_column.intact());
    }
    for (const Plane plane : kPlanes) {
      const ConstPlaneMemory from = (plane == Plane::kRow ? row : column).source();
      std::vector<float> one(static_cast<size_t>(m.rows() * m.columns()));
      std::vector<float> more(one.size());
      dequantize(spec, plane, from, 1.5F, {one.data(), DType::kF32, m.rows(), m.columns(), m.columns()}, {1});
      dequantize(spec, plane, from, 1.5F, {more.data(), DType::kF32, m.rows(), m.columns(), m.columns()}, {3});
      EXPECT_TRUE(more == one) << describe(spec);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, QuantizeThreadsTest, every_kernel(), kernel_name);

}  // namespace
}  // namespace tessera
