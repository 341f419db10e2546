// Quantising and then gathering gives the same bytes as gathering and then quantising.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "codec/quant/quantize_testing.h"

namespace tessera {
namespace {

// The number of rows (columns, if a matrix is cut along its columns) that shards must be a multiple of so that no block
// straddles two.
int64_t alignment(const QuantSpec& spec) {
  switch (spec.format) {
    case Format::kNvfp4:
      return 16;
    case Format::kMxfp8:
    case Format::kMxfp8E5M2:
      return 32;
    case Format::kFp8Block1x128:
    case Format::kFp8Block128x128:
      return 128;
    default:
      return 1;
  }
}

// The dim that is cut, and the sizes.
struct Cut {
  bool rows;
  std::vector<int64_t> sizes;
};

struct Shards {
  std::vector<OraclePlane> planes;
  std::vector<PlaneShape> shapes;
};

// Each with an amax: the whole matrix's or its own.
Shards quantized_shards(const TestMatrix& m, const QuantSpec& spec, Plane plane, const Cut& cut, bool own_amax) {
  const float whole = compute_amax({{m.view()}})[0].value;
  Shards shards;
  int64_t first = 0;
  for (const int64_t size : cut.sizes) {
    const MatrixView shard = cut.rows ? m.part(first, size, 0, m.columns()) : m.part(0, m.rows(), first, size);
    first += size;
    const float amax = own_amax ? compute_amax({{shard}})[0].value : whole;
    shards.planes.push_back(quantized(shard, spec, plane, amax));
    shards.shapes.push_back(plane_shape(spec, plane, shard.rows, shard.columns));
  }
  return shards;
}

// Whether shards follow one another in a plane, or are side by side.
bool stacks(const QuantSpec& spec, Plane plane, const Cut& cut) {
  const bool transposed = plane == Plane::kColumn && !oracle::is_mxfp8(spec.format);
  return cut.rows != transposed;
}

// The rows of all shards side by side, byte by byte.
std::vector<std::byte> side_by_side(const std::vector<std::vector<std::byte>>& parts, size_t rows) {
  std::vector<std::byte> joined;
  for (size_t r = 0; r < rows; ++r) {
    for (const auto& part : parts) {
      const size_t width = part.size() / rows;
      joined.insert(joined.end(), part.begin() + static_cast<ptrdiff_t>(r * width),
                    part.begin() + static_cast<ptrdiff_t>((r + 1) * width));
    }
  }
  return joined;
}

std::vector<std::byte> behind_one_another(const std::vector<std::vector<std::byte>>& parts) {
  std::vector<std::byte> joined;
  for (const auto& part : parts) joined.insert(joined.end(), part.begin(), part.end());
  return joined;
}

// Joined by the code under test if shards are equal, as they are after a gather.
std::vector<std::byte> joined(const std::vector<std::vector<std::byte>>& parts, size_t rows, bool stacked) {
  if (stacked) return behind_one_another(parts);
  const std::vector<std::byte> expected = side_by_side(parts, rows);
  const bool equal = std::ranges::all_of(parts, [&](const auto& part) { return part.size() == parts[0].size(); });
  if (!equal) return expected;
  const std::vector<std::byte> gathered = behind_one_another(parts);
  std::vector<std::byte> result(gathered.size());
  deinterleave_columns(gathered.data(), static_cast<int64_t>(parts.size()), static_cast<int64_t>(rows),
                       static_cast<int64_t>(parts[0].size() / rows), result.data());
  EXPECT_EQ(difference(result, expected), "") << "deinterleave_columns()";
  return result;
}

OraclePlane gathered(const Shards& shards, const QuantSpec& spec, Plane plane, const Cut& cut) {
  std::vector<std::vector<std::byte>> codes;
  std::vector<std::vector<std::byte>> scales;
  for (const OraclePlane& part : shards.planes) {
    codes.push_back(part.codes);
    scales.push_back(part.scales);
  }
  const bool stacked = stacks(spec, plane, cut);
  OraclePlane result;
  result.codes = joined(codes, static_cast<size_t>(shards.shapes[0].code_rows), stacked);
  result.scales = oracle::block_of(spec).rows == 0
                      ? scales[0]
                      : joined(scales, static_cast<size_t>(shards.shapes[0].scale_rows), stacked);
  return result;
}

int64_t total(const Cut& cut) {
  return std::accumulate(cut.sizes.begin(), cut.sizes.end(), int64_t{0});
}

// Shards' magnitudes differ, so that their own amaxes differ as well.
TestMatrix matrix_for(DType dtype, const Cut& cut, int64_t other, uint32_t seed) {
  const int64_t size = total(cut);
  TestMatrix m = random_matrix(dtype, cut.rows ? size : other, cut.rows ? other : size, seed);
  for (int64_t r = 0; r < m.rows(); ++r)
    for (int64_t c = 0; c < m.columns(); ++c)
      m.set(r, c, m.get(r, c) * (1 + static_cast<float>(cut.rows ? r : c) / static_cast<float>(size)));
  return m;
}

class QuantizeShardTest : public EveryKernelTest {};

TEST_P(QuantizeShardTest, WholeBlocksAndTheWholesAmaxGiveTheWholesBytes) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const QuantSpec& spec : every_spec()) {
      const int64_t a = alignment(spec);
      for (const bool rows : {true, false}) {
        // Equal shards, and unequal ones, the last of which may end wherever a plane can.
        for (const Cut& cut : {Cut{rows, {2 * a, 2 * a}}, Cut{rows, {2 * a, a, 6}}}) {
          const TestMatrix m = matrix_for(dtype, cut, 38, 41);
          const float amax = oracle_amax(m);
          for (const Plane plane : kPlanes) {
            if (!is_packable(spec, plane, a % 2 == 0 ? 2 : a, 2)) continue;
            const OraclePlane got = gathered(quantized_shards(m, spec, plane, cut, false), spec, plane, cut);
            EXPECT_EQ(difference(got, quantized(m.view(), spec, plane, amax)), "")
                << describe(spec, plane, dtype, m.rows(), m.columns()) << (rows ? " by rows" : " by columns");
          }
        }
      }
    }
  }
}

// The other way round: the slice of a whole plane that a rank sends equals the plane of its shard.
TEST_P(QuantizeShardTest, ASliceOfTheWholesRowPlaneIsTheShardsRowPlane) {
  for (const QuantSpec& spec : every_spec()) {
    const int64_t a = alignment(spec);
    const TestMatrix m = random_matrix(DType::kBF16, 4 * a, 160, 42);
    const float amax = oracle_amax(m);
    const OraclePlane whole = quantized(m.view(), spec, Plane::kRow, amax);
    const OraclePlane shard = quantized(m.part(a, 2 * a, 0, 160), spec, Plane::kRow, amax);
    const auto slice = [](const std::vector<std::byte>& bytes, size_t from, size_t size) {
      return std::vector(bytes.begin() + static_cast<ptrdiff_t>(from),
                         bytes.begin() + static_cast<ptrdiff_t>(from + size));
    };
    EXPECT_EQ(slice(whole.codes, whole.codes.size() / 4, shard.codes.size()), shard.codes) << describe(spec);
    if (oracle::block_of(spec).rows == 0)
      EXPECT_EQ(whole.scales, shard.scales);
    else
      EXPECT_EQ(slice(whole.scales, whole.scales.size() / 4, shard.scales.size()), shard.scales) << describe(spec);
  }
}

TEST_P(QuantizeShardTest, AnAmaxOfTheShardAloneGivesOtherBytes) {
  for (const QuantSpec& spec : every_spec()) {
    const int64_t a = alignment(spec);
    const Cut cut{true, {64 * a / std::gcd<int64_t>(a, 64), 64 * a / std::gcd<int64_t>(a, 64)}};
    const TestMatrix m = matrix_for(DType::kBF16, cut, 64, 43);
    for (const Plane plane : kPlanes) {
      const OraclePlane whole = quantized(m.view(), spec, plane, oracle_amax(m));
      const OraclePlane got = gathered(quantized_shards(m, spec, plane, cut, true), spec, plane, cut);
      const bool power_of_two = spec.power_of_two.value_or(false) && oracle::block_of(spec).rows == 0;
      if (power_of_two) continue;  // which may round both to one scale
      EXPECT_EQ(got == whole, !needs_amax(spec.format)) << describe(spec);
    }
  }
}

TEST_P(QuantizeShardTest, ShardsThatCutABlockGiveOtherBytes) {
  for (const QuantSpec& spec : every_spec()) {
    const int64_t a = alignment(spec);
    if (a == 1) continue;
    const Cut cut{true, {a / 2, a, a / 2}};
    const TestMatrix m = matrix_for(DType::kF32, cut, 48, 44);
    const OraclePlane whole = quantized(m.view(), spec, Plane::kColumn, oracle_amax(m));
    const OraclePlane got = gathered(quantized_shards(m, spec, Plane::kColumn, cut, false), spec, Plane::kColumn, cut);
    EXPECT_NE(got.codes, whole.codes) << describe(spec);
    // A row plane is only affected if its blocks are higher than a row.
    const OraclePlane row = gathered(quantized_shards(m, spec, Plane::kRow, cut, false), spec, Plane::kRow, cut);
    const OraclePlane whole_row = quantized(m.view(), spec, Plane::kRow, oracle_amax(m));
    EXPECT_EQ(row == whole_row, oracle::block_of(spec).rows == 1) << describe(spec);
  }
}

// NVFP4's choice for a planner: one gathered plane serves both passes.
TEST_P(QuantizeShardTest, AGatheredRowPlaneOf16x16IsTransposedToTheColumnPlane) {
  const QuantSpec spec = nvfp4_spec(NvScaling::k16x16);
  const Cut cut{true, {48, 16, 32}};
  const TestMatrix m = matrix_for(DType::kBF16, cut, 80, 45);
  TestPlane row(spec, Plane::kRow, 96, 80);
  TestPlane column(spec, Plane::kColumn, 96, 80);
  row.put(gathered(quantized_shards(m, spec, Plane::kRow, cut, false), spec, Plane::kRow, cut));
  transpose_plane(spec, 96, 80, row.source(), column.memory());
  EXPECT_EQ(difference(column.get(), quantized(m.view(), spec, Plane::kColumn, oracle_amax(m))), "");
}

INSTANTIATE_TEST_SUITE_P(Kernels, QuantizeShardTest, every_kernel(), kernel_name);

}  // namespace
}  // namespace tessera
