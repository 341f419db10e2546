// How a matrix's two planes fit together.
#include <gtest/gtest.h>

#include <utility>

#include "codec/quant/quantize_testing.h"

namespace tessera {
namespace {

constexpr std::pair<int64_t, int64_t> kPlaneShapes[] = {{2, 2},     {16, 16},   {34, 50},   {128, 256},
                                                        {130, 258}, {256, 128}, {46, 1030}, {272, 20}};

TestMatrix transposed_matrix(const TestMatrix& m) {
  TestMatrix t(m.dtype(), m.columns(), m.rows());
  for (int64_t r = 0; r < m.rows(); ++r)
    for (int64_t c = 0; c < m.columns(); ++c) t.set_bits(c, r, m.bits(r, c));
  return t;
}

class QuantizePlaneTest : public EveryKernelTest {};

TEST_P(QuantizePlaneTest, BothInOneCallAreEachAlone) {
  for (const auto& [rows, columns] : kPlaneShapes) {
    const TestMatrix m = random_matrix(DType::kBF16, rows, columns, 5);
    for (const QuantSpec& spec : every_spec()) {
      // Different amaxes must not meet in codes that both planes share.
      for (const PlaneAmax amax : {PlaneAmax{3, 3}, PlaneAmax{3, 7}}) {
        TestPlane row(spec, Plane::kRow, rows, columns);
        TestPlane column(spec, Plane::kColumn, rows, columns);
        quantize(m.view(), spec, amax, {row.memory(), column.memory()});
        EXPECT_TRUE(row.intact() && column.intact());
        EXPECT_EQ(difference(row.get(), quantized(m.view(), spec, Plane::kRow, amax.row)), "")
            << describe(spec, Plane::kRow, m.dtype(), rows, columns);
        EXPECT_EQ(difference(column.get(), quantized(m.view(), spec, Plane::kColumn, amax.column)), "")
            << describe(spec, Plane::kColumn, m.dtype(), rows, columns);
      }
    }
  }
}

TEST_P(QuantizePlaneTest, TheColumnPlaneIsTheTransposedMatrixsRowPlane) {
  for (const DType dtype : kQuantizable) {
    for (const auto& [rows, columns] : kPlaneShapes) {
      const TestMatrix m = random_matrix(dtype, rows, columns, 6);
      const TestMatrix t = transposed_matrix(m);
      for (const QuantSpec& spec : every_spec()) {
        OraclePlane turned = quantized(t.view(), spec, Plane::kRow, 1.25F);
        if (oracle::is_mxfp8(spec.format)) {  // whose column plane has the matrix's layout
          turned.codes = oracle::transpose_bytes(turned.codes, columns, rows);
          turned.scales = oracle::transpose_bytes(turned.scales, columns, oracle::ceil_div(rows, 32));
        }
        EXPECT_EQ(difference(quantized(m.view(), spec, Plane::kColumn, 1.25F), turned), "")
            << describe(spec, Plane::kColumn, dtype, rows, columns);
      }
    }
  }
}

TEST_P(QuantizePlaneTest, OnlyThePackedDimMustBeEven) {
  for (const NvScaling scaling : {NvScaling::k1x16, NvScaling::k16x16}) {
    const QuantSpec spec = nvfp4_spec(scaling);
    for (const int64_t odd : {1, 15, 17, 129, 257}) {
      const TestMatrix tall = random_matrix(DType::kBF16, 34, odd, 7);
      const TestMatrix wide = random_matrix(DType::kBF16, odd, 34, 7);
      EXPECT_EQ(difference(quantized(tall.view(), spec, Plane::kColumn, 1),
                           oracle_quantize(tall.oracle(), spec, Plane::kColumn, 1)),
                "");
      EXPECT_EQ(difference(quantized(wide.view(), spec, Plane::kRow, 1),
                           oracle_quantize(wide.oracle(), spec, Plane::kRow, 1)),
                "");
    }
  }
}

TEST_P(QuantizePlaneTest, SquareBlocksAndOneScaleNeedOnlyATransposeOfCodes) {
  std::vector<QuantSpec> specs;
  for (const QuantSpec& spec : every_spec()) {
    const BlockShape block = oracle::block_of(spec);
    if (block.rows == block.columns) specs.push_back(spec);
  }
  ASSERT_GE(specs.size(), 7U);
  for (const auto& [rows, columns] : kPlaneShapes) {
    const TestMatrix m = random_matrix(DType::kF16, rows, columns, 8);
    for (const QuantSpec& spec : specs) {
      TestPlane row(spec, Plane::kRow, rows, columns, {3, 1}, {1, 5});
      TestPlane column(spec, Plane::kColumn, rows, columns, {1, 3}, {2, 1});
      row.put(quantized(m.view(), spec, Plane::kRow, 2));
      transpose_plane(spec, rows, columns, row.source(), column.memory(), {3});
      EXPECT_TRUE(column.intact());
      EXPECT_EQ(difference(column.get(), oracle_quantize(m.oracle(), spec, Plane::kColumn, 2)), "")
          << describe(spec, Plane::kColumn, m.dtype(), rows, columns);
    }
  }
}

// More than the share of one thread.
TEST_P(QuantizePlaneTest, ALargePlaneIsTransposedByThreadsTheSame) {
  constexpr int64_t kRows = 1040;
  constexpr int64_t kColumns = 2062;
  const QuantSpec spec = nvfp4_spec(NvScaling::k16x16);
  TestPlane row(spec, Plane::kRow, kRows, kColumns);
  TestPlane column(spec, Plane::kColumn, kRows, kColumns);
  OraclePlane from{random_bytes(kRows * kColumns / 2, 9), std::vector<std::byte>(kRows * 129)};
  row.put(from);
  transpose_plane(spec, kRows, kColumns, row.source(), column.memory(), {3});
  const OraclePlane to = column.get();
  const auto nibble = [](const std::vector<std::byte>& codes, int64_t i) {
    return static_cast<unsigned>(codes[static_cast<size_t>(i / 2)]) / (i % 2 == 0 ? 1 : 16) % 16;
  };
  size_t wrong = 0;
  for (int64_t r = 0; r < kRows; ++r)
    for (int64_t c = 0; c < kColumns; ++c)
      wrong += nibble(from.codes, r * kColumns + c) != nibble(to.codes, c * kRows + r);
  EXPECT_EQ(wrong, 0U);
  EXPECT_EQ(to.scales, std::vector<std::byte>(kColumns * 65));
}

TEST_P(QuantizePlaneTest, WhereNoPlaneIsWantedNothingIsDone) {
  const TestMatrix m = random_matrix(DType::kF32, 3, 17, 11);
  for (const QuantSpec& spec : every_spec()) EXPECT_NO_THROW(quantize(m.view(), spec, {1, 1}, {})) << describe(spec);
}

TEST_P(QuantizePlaneTest, WhileTheNoOpFlagIsUpNothingIsReadOrWritten) {
  const MatrixView unreadable{reinterpret_cast<const void*>(16), DType::kF32, 64, 64, 64};
  const float up = 1;
  const float down = 0;
  const TestMatrix m = random_matrix(DType::kF32, 64, 64, 10);
  for (const QuantSpec& spec : every_spec()) {
    TestPlane row(spec, Plane::kRow, 64, 64);
    TestPlane column(spec, Plane::kColumn, 64, 64);
    const OraclePlane before = row.get();
    quantize(unreadable, spec, {1, 1}, {row.memory(), column.memory()}, {}, {}, &up);
    EXPECT_EQ(row.get(), before) << describe(spec);
    EXPECT_EQ(
        difference(column.get().codes,
                   std::vector(4096 / (8 / static_cast<size_t>(bits_of(column.shape().code_dtype))), std::byte{0xA5})),
        "")
        << describe(spec);
    quantize(m.view(), spec, {1, 1}, {row.memory(), {}}, {}, {}, &down);
    EXPECT_EQ(row.get(), quantized(m.view(), spec, Plane::kRow, 1)) << describe(spec);
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, QuantizePlaneTest, every_kernel(), kernel_name);

}  // namespace
}  // namespace tessera
