// Blocks that the end of a dim clips, vectors that end in a tail, rows anywhere in memory.
#include <gtest/gtest.h>

#include <utility>

#include "codec/quant/quantize_testing.h"

namespace tessera {
namespace {

// Quantises all planes in one call, from and to rows with gaps at odd addresses.
void expect_bytes(const TestMatrix& m, const OracleMatrix& values, const QuantSpec& spec) {
  const int64_t rows = m.rows();
  const int64_t columns = m.columns();
  const int64_t n = 3 * rows + columns;
  const float amax = oracle::amax(values);
  std::vector<Plane> wanted;
  std::vector<OraclePlane> want;
  for (const Plane plane : kPlanes) {
    if (!is_packable(spec, plane, rows, columns)) continue;
    wanted.push_back(plane);
    want.push_back(oracle_quantize(values, spec, plane, amax));
  }
  SCOPED_TRACE(describe(spec, Plane::kRow, m.dtype(), rows, columns));
  with_every_kernel([&] {
    std::vector<TestPlane> to;
    Planes planes;
    for (const Plane plane : wanted) {
      to.emplace_back(spec, plane, rows, columns, Spacing{n % 5, static_cast<size_t>(n % 7)},
                      Spacing{n % 3, static_cast<size_t>(n % 11)});
      (plane == Plane::kRow ? planes.row : planes.column) = to.back().memory();
    }
    quantize(m.view(), spec, {amax, amax}, planes);
    for (size_t i = 0; i < to.size(); ++i) {
      ASSERT_EQ(difference(to[i].get(), want[i]), "") << to_string(wanted[i]) << " plane";
      ASSERT_TRUE(to[i].intact()) << to_string(wanted[i]) << " plane";
    }
  });
}

class QuantizeShapeTest : public testing::TestWithParam<DType> {
 protected:
  static void expect_every_format(int64_t rows, int64_t columns) {
    const int64_t n = 3 * rows + columns;
    const TestMatrix m =
        random_matrix(GetParam(), rows, columns, static_cast<uint32_t>(n), {n % 6, static_cast<size_t>(n % 9)});
    const OracleMatrix values = m.oracle();
    for (const QuantSpec& spec : every_spec()) {
      expect_bytes(m, values, spec);
      ASSERT_FALSE(HasFatalFailure());
    }
  }
};

TEST_P(QuantizeShapeTest, EveryNumberOfColumns) {
  for (int64_t columns = 1; columns <= 300 && !HasFatalFailure(); ++columns)
    expect_every_format(columns % 4 == 1 ? 3 : 2, columns);
}

TEST_P(QuantizeShapeTest, EveryNumberOfRows) {
  for (int64_t rows = 1; rows <= 140 && !HasFatalFailure(); ++rows) expect_every_format(rows, 2 + rows % 4);
}

TEST_P(QuantizeShapeTest, BlocksClippedInBothDims) {
  constexpr int64_t kEdges[] = {14, 18, 31, 34, 46, 127, 130};
  for (const int64_t rows : kEdges)
    for (const int64_t columns : kEdges)
      if (!HasFatalFailure() && rows * columns % 4 != 1) expect_every_format(rows, columns);
}

INSTANTIATE_TEST_SUITE_P(DTypes, QuantizeShapeTest, testing::ValuesIn(kQuantizable), dtype_name);

class QuantizeEmptyTest : public EveryKernelTest {};

TEST_P(QuantizeEmptyTest, AMatrixWithoutElementsHasAtMostItsOneScale) {
  for (const QuantSpec& spec : every_spec()) {
    for (const auto& [rows, columns] : {std::pair{0, 0}, std::pair{0, 64}, std::pair{64, 0}}) {
      for (const Plane plane : kPlanes) {
        TestPlane to(spec, plane, rows, columns);
        EXPECT_EQ(to.shape().code_bytes(), 0);
        EXPECT_EQ(to.shape().gemm_bytes(), to.shape().scale_bytes());
        quantize({nullptr, DType::kBF16, rows, columns, columns}, spec, {224, 224}, one_plane(plane, to.memory()));
        const OracleMatrix none{DType::kBF16, rows, columns, {}};
        EXPECT_EQ(difference(to.get(), oracle_quantize(none, spec, plane, 224)), "") << describe(spec);
        EXPECT_EQ(to.get().scales.size(), oracle::block_of(spec).rows == 0 ? 4U : 0U) << describe(spec);
        EXPECT_TRUE(to.intact());
      }
    }
  }
}

// The stride of a single row is ignored.
TEST_P(QuantizeEmptyTest, ASingleRowMayHaveAnyStride) {
  const TestMatrix m = random_matrix(DType::kF32, 1, 48, 4);
  for (const QuantSpec& spec : every_spec()) {
    MatrixView view = m.view();
    view.row_stride = -7;
    EXPECT_EQ(difference(quantized(view, spec, Plane::kRow, 1), quantized(m.view(), spec, Plane::kRow, 1)), "");
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, QuantizeEmptyTest, every_kernel(), kernel_name);

}  // namespace
}  // namespace tessera
