#include "codec/quant/blocks.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "codec/codec_testing.h"
#include "codec/simd/cast.h"

namespace tessera {
namespace {

using codec::BlockDecoder;
using codec::BlockEncoder;
using codec::BlockFormat;
using codec::BlockGrid;
using codec::NonfiniteElements;
using codec::SourceBox;
using codec::TargetBox;

using Engine = std::mt19937;

int64_t draw(Engine& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

struct Cut {
  int64_t begin = 0;
  int64_t end = 0;
};

// Cuts [0, n) into random parts.
std::vector<Cut> random_cuts(Engine& random, int64_t n, int64_t longest) {
  std::vector<Cut> cuts;
  for (int64_t at = 0; at < n;) {
    const int64_t end = std::min(n, at + draw(random, 1, longest));
    cuts.push_back({at, end});
    at = end;
  }
  return cuts;
}

// A matrix of any of the input types, and the same matrix as input for tessera::quantize().
struct Matrix {
  int64_t rows = 0;
  int64_t columns = 0;
  DType dtype = DType::kF32;
  std::vector<std::byte> data;       // row-major
  std::vector<std::byte> quantized;  // f64: rounded to f32

  Matrix(Engine& random, int64_t m, int64_t k, DType type) : rows(m), columns(k), dtype(type) {
    const auto n = static_cast<size_t>(m * k);
    std::vector<float> values(n);
    for (float& value : values)
      value = draw(random, 0, 20) == 0 ? 0
                                       : std::ldexp(std::uniform_real_distribution<float>(-1, 1)(random),
                                                    static_cast<int>(draw(random, -12, 4)));
    data.resize(n * element());
    cast_row(DType::kF32, dtype)(values.data(), data.data(), n);
    if (dtype == DType::kF64)  // values that need rounding
      for (size_t i = 0; i < n; ++i) {
        double value = 0;
        std::memcpy(&value, data.data() + i * sizeof(value), sizeof(value));
        value *= 1 + 1e-9;
        std::memcpy(data.data() + i * sizeof(value), &value, sizeof(value));
      }
    quantized.resize(n * static_cast<size_t>(bytes_of(as(), 1)));
    cast_row(dtype, as())(data.data(), quantized.data(), n);
  }
  DType as() const { return dtype == DType::kF64 ? DType::kF32 : dtype; }
  size_t element() const { return static_cast<size_t>(bytes_of(dtype, 1)); }
  MatrixView view() const { return {quantized.data(), as(), rows, columns, columns}; }
};

// The result of tessera::quantize() with the scalar reference.
struct Reference {
  BlockFormat format;
  PlaneShape shape;
  float amax = 0;
  std::vector<std::byte> codes, scales;

  Reference(const BlockFormat& of, const Matrix& matrix) : format(of) {
    const ForcedKernel scalar("scalar");
    const MatrixView view = matrix.view();
    shape = plane_shape(format.spec, Plane::kRow, matrix.rows, matrix.columns);
    amax = compute_amax({&view, 1})[0].value;
    codes.resize(static_cast<size_t>(shape.code_bytes()));
    scales.resize(static_cast<size_t>(shape.scale_bytes()));
    quantize(view, format.spec, {amax, 0}, {memory(), {}});
  }
  PlaneMemory memory() { return {codes.data(), shape.code_row_bytes(), scales.data(), shape.scale_row_bytes()}; }
  // 0 to 15 for f4.
  uint8_t code(int64_t row, int64_t column) const {
    const int64_t start = row * shape.code_row_bytes();
    if (!format.packed()) return static_cast<uint8_t>(codes[static_cast<size_t>(start + column)]);
    return static_cast<uint8_t>(codes[static_cast<size_t>(start + column / 2)] >> (column % 2 * 4) & std::byte{15});
  }
  std::vector<std::byte> decoded(DType to, int64_t rows, int64_t columns) const {
    const ForcedKernel scalar("scalar");
    const DType as = to == DType::kF64 ? DType::kF32 : to;
    std::vector<std::byte> values(static_cast<size_t>(bytes_of(as, rows * columns)));
    dequantize(format.spec, Plane::kRow, {codes.data(), shape.code_row_bytes(), scales.data(), shape.scale_row_bytes()},
               amax, {values.data(), as, rows, columns, columns});
    std::vector<std::byte> cast(static_cast<size_t>(bytes_of(to, rows * columns)));
    cast_row(as, to)(values.data(), cast.data(), static_cast<size_t>(rows * columns));
    return cast;
  }
};

// All blocks of a matrix: amaxes as found by boxes, and scales.
struct Blocks {
  int64_t across = 0;
  std::vector<float> amaxes;
  std::vector<std::byte> scales;
  int64_t scale_bytes = 0;

  Blocks(const BlockFormat& format, int64_t rows, int64_t columns) : scale_bytes(format.scale_bytes()) {
    const auto up = [](int64_t n, int64_t to) { return n / to + (n % to == 0 ? 0 : 1); };
    across = up(columns, format.block_columns);
    amaxes.resize(static_cast<size_t>(up(rows, format.block_rows) * across));
    scales.resize(amaxes.size() * static_cast<size_t>(scale_bytes));
  }
  size_t at(const BlockFormat& format, int64_t row, int64_t column) const {
    return static_cast<size_t>(row / format.block_rows * across + column / format.block_columns);
  }
};

// A box of the matrix, with its elements in any layout around `memory`'s middle.
struct Placed {
  std::vector<std::byte> memory;
  int64_t first = 0;
  int64_t row_stride = 0;
  int64_t column_stride = 0;

  Placed(Engine& random, int64_t rows, int64_t columns, int64_t element) {
    const bool upright = draw(random, 0, 3) == 0;
    const int64_t gap = draw(random, 0, 2) == 0 ? draw(random, 1, 3) : 0;
    column_stride = upright ? (rows + gap) * element : element * (draw(random, 0, 4) == 0 ? 2 : 1);
    row_stride = upright ? element : columns * column_stride + gap * element;
    if (draw(random, 0, 4) == 0) row_stride = -row_stride;
    if (draw(random, 0, 6) == 0) column_stride = -column_stride;
    first = std::max<int64_t>(0, -row_stride * (rows - 1)) + std::max<int64_t>(0, -column_stride * (columns - 1));
    const int64_t end =
        first + std::max<int64_t>(0, row_stride * (rows - 1)) + std::max<int64_t>(0, column_stride * (columns - 1));
    memory.resize(static_cast<size_t>(end + element), std::byte{0xA5});
  }
  std::byte* at(int64_t row, int64_t column) {
    return memory.data() + first + row * row_stride + column * column_stride;
  }
};

class BlocksTest : public EveryKernelTest {
 protected:
  static constexpr int64_t kMostRows = 300;
  static constexpr int64_t kMostColumns = 400;

  // Runs each phase with different boxes and compares with the reference.
  static void check(Engine& random, const BlockFormat& format, DType input, int64_t rows, int64_t columns) {
    SCOPED_TRACE(std::string(to_string(format.spec.format)) + " of " + std::string(to_string(input)) + " " +
                 std::to_string(rows) + "x" + std::to_string(columns));
    const Matrix matrix(random, rows, columns, input);
    const Reference reference(format, matrix);
    Blocks blocks(format, rows, columns);
    for_each_box(random, rows, columns, [&](Cut r, Cut c) { gather(random, format, matrix, blocks, r, c); });
    const BlockEncoder encoder(format, input);
    encoder.scales(reference.amax, blocks.amaxes.data(), static_cast<int64_t>(blocks.amaxes.size()),
                   blocks.scales.data());
    check_scales(format, reference, blocks, rows, columns);
    for_each_box(random, rows, columns,
                 [&](Cut r, Cut c) { check_codes(random, encoder, matrix, reference, blocks, r, c); });
    for (const DType to : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
      const std::vector<std::byte> expected = reference.decoded(to, rows, columns);
      for_each_box(random, rows, columns,
                   [&](Cut r, Cut c) { check_decoded(random, reference, blocks, expected, to, columns, r, c); });
    }
  }

  static void for_each_box(Engine& random, int64_t rows, int64_t columns, const std::function<void(Cut, Cut)>& visit) {
    for (const Cut& r : random_cuts(random, rows, std::max<int64_t>(rows / 2, 1)))
      for (const Cut& c : random_cuts(random, columns, std::max<int64_t>(columns / 2, 1))) visit(r, c);
  }

  static SourceBox source_of(const Matrix& matrix, Cut r, Cut c, Placed& placed) {
    for (int64_t i = r.begin; i < r.end; ++i)
      for (int64_t j = c.begin; j < c.end; ++j)
        std::memcpy(placed.at(i - r.begin, j - c.begin),
                    matrix.data.data() + static_cast<size_t>(i * matrix.columns + j) * matrix.element(),
                    matrix.element());
    return {placed.at(0, 0),   matrix.dtype,         r.end - r.begin, c.end - c.begin,
            placed.row_stride, placed.column_stride, r.begin,         c.begin};
  }

  static void gather(Engine& random, const BlockFormat& format, const Matrix& matrix, Blocks& blocks, Cut r, Cut c) {
    Placed placed(random, r.end - r.begin, c.end - c.begin, static_cast<int64_t>(matrix.element()));
    NonfiniteElements found;
    codec::add_block_amaxes(format, source_of(matrix, r, c, placed),
                            {blocks.amaxes.data() + blocks.at(format, r.begin, c.begin), blocks.across}, found);
    EXPECT_EQ(found.count, 0);
  }

  static void check_scales(const BlockFormat& format, const Reference& reference, const Blocks& blocks, int64_t rows,
                           int64_t columns) {
    const bool by_row = reference.shape.scale_rows == rows;
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) {
        const auto got = blocks.scales.data() + blocks.at(format, i, j) * static_cast<size_t>(blocks.scale_bytes);
        const int64_t line = by_row ? i : i / format.block_rows;
        const auto expected = reference.scales.data() + line * reference.shape.scale_row_bytes() +
                              j / format.block_columns * blocks.scale_bytes;
        ASSERT_EQ(std::memcmp(got, expected, static_cast<size_t>(blocks.scale_bytes)), 0) << i << ", " << j;
      }
  }

  // Codes begin at either half of a byte, for any column.
  static void check_codes(Engine& random, const BlockEncoder& encoder, const Matrix& matrix, const Reference& reference,
                          const Blocks& blocks, Cut r, Cut c) {
    const BlockFormat& format = encoder.format();
    Placed placed(random, r.end - r.begin, c.end - c.begin, static_cast<int64_t>(matrix.element()));
    const bool odd = format.packed() && (draw(random, 0, 3) == 0 ? draw(random, 0, 1) : c.begin % 2) != 0;
    const int64_t width = c.end - c.begin + (odd ? 1 : 0);
    const int64_t row_bytes = format.packed() ? (width + 1) / 2 : width;
    GuardedBytes codes(static_cast<size_t>((r.end - r.begin) * row_bytes), 1);
    encoder.codes(reference.amax, source_of(matrix, r, c, placed),
                  {blocks.amaxes.data() + blocks.at(format, r.begin, c.begin), blocks.across},
                  {codes.data(), row_bytes, odd});
    ASSERT_TRUE(codes.intact());
    std::vector<std::byte> expected(codes.size());
    for (int64_t i = r.begin; i < r.end; ++i)
      for (int64_t j = c.begin; j < c.end; ++j) {
        const int64_t at = j - c.begin + (odd ? 1 : 0);
        const auto byte = static_cast<size_t>((i - r.begin) * row_bytes + (format.packed() ? at / 2 : at));
        expected[byte] |= std::byte{reference.code(i, j)} << (format.packed() ? at % 2 * 4 : 0);
      }
    ASSERT_TRUE(std::equal(expected.begin(), expected.end(), codes.data()))
        << "rows " << r.begin << " to " << r.end << ", columns " << c.begin << " to " << c.end << ", odd " << odd;
  }

  static void check_decoded(Engine& random, const Reference& reference, const Blocks& blocks,
                            const std::vector<std::byte>& expected, DType to, int64_t columns, Cut r, Cut c) {
    const BlockFormat& format = reference.format;
    const bool odd = format.packed() && draw(random, 0, 1) != 0;
    const int64_t width = c.end - c.begin + (odd ? 1 : 0);
    const int64_t row_bytes = format.packed() ? (width + 1) / 2 : width;
    std::vector<std::byte> codes(static_cast<size_t>((r.end - r.begin) * row_bytes), std::byte{0});
    for (int64_t i = r.begin; i < r.end; ++i)
      for (int64_t j = c.begin; j < c.end; ++j) {
        const int64_t at = j - c.begin + (odd ? 1 : 0);
        const auto byte = static_cast<size_t>((i - r.begin) * row_bytes + (format.packed() ? at / 2 : at));
        codes[byte] |= std::byte{reference.code(i, j)} << (format.packed() ? at % 2 * 4 : 0);
      }
    const int64_t element = bytes_of(to, 1);
    Placed placed(random, r.end - r.begin, c.end - c.begin, element);
    Placed plain = placed;
    for (int64_t i = r.begin; i < r.end; ++i)
      for (int64_t j = c.begin; j < c.end; ++j)
        std::memcpy(plain.at(i - r.begin, j - c.begin),
                    expected.data() + static_cast<size_t>((i * columns + j) * element), static_cast<size_t>(element));
    const TargetBox target{placed.at(0, 0),      to,      r.end - r.begin, c.end - c.begin, placed.row_stride,
                           placed.column_stride, r.begin, c.begin};
    BlockDecoder(format, reference.amax)
        .decode({codes.data(), row_bytes, odd},
                {blocks.scales.data() + blocks.at(format, r.begin, c.begin) * static_cast<size_t>(blocks.scale_bytes),
                 blocks.across * blocks.scale_bytes},
                target);
    ASSERT_EQ(placed.memory, plain.memory) << to_string(to) << ": rows " << r.begin << " to " << r.end << ", columns "
                                           << c.begin << " to " << c.end << ", odd " << odd;
  }
};

std::vector<BlockFormat> every_block_format() {
  std::vector<BlockFormat> formats;
  for (const Format format : all_formats()) formats.emplace_back(format);
  formats.emplace_back(Format::kNvfp4, NvScaling::k1x16);
  return formats;
}

constexpr DType kInputs[] = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};

TEST_P(BlocksTest, BoxesOfAnyCutGiveTheBitsOfTheWhole) {
  Engine random(7);
  for (const BlockFormat& format : every_block_format())
    for (const DType input : kInputs)
      for (int i = 0; i < 4; ++i)
        check(random, format, input, draw(random, 1, i == 0 ? 20 : kMostRows),
              2 * draw(random, 1, (i == 0 ? 40 : kMostColumns) / 2));
}

TEST_P(BlocksTest, SoDoBoxesWiderThanAStrip) {
  Engine random(8);
  for (const BlockFormat& format : every_block_format()) check(random, format, DType::kBF16, 5, 9002);
}

TEST_P(BlocksTest, NanAndInfinityAreCountedAndTheFirstIsNamed) {
  Engine random(9);
  for (const BlockFormat& format : every_block_format()) {
    for (const DType input : kInputs) {
      Matrix matrix(random, 40, 300, input);
      const auto set = [&](int64_t row, int64_t column, float value) {
        cast_row(DType::kF32, input)(
            &value, matrix.data.data() + static_cast<size_t>(row * 300 + column) * matrix.element(), 1);
      };
      set(21, 299, INFINITY);
      set(21, 130, -INFINITY);
      set(21, 129, NAN);
      set(39, 0, NAN);
      Blocks blocks(format, 40, 300);
      NonfiniteElements found;
      const auto element = static_cast<int64_t>(matrix.element());
      codec::add_block_amaxes(format, {matrix.data.data(), input, 40, 300, 300 * element, element, 0, 0},
                              {blocks.amaxes.data(), blocks.across}, found);
      EXPECT_EQ(found.count, 4);
      EXPECT_EQ(found.row, 21);
      EXPECT_EQ(found.column, 129);
      EXPECT_TRUE(std::isnan(found.value));
    }
  }
}

TEST(BlockFormat, CountsTheBitsOf256Elements) {
  const auto bits = [](Format format, NvScaling scaling = NvScaling::k16x16) {
    return BlockFormat(format, scaling).bits_of_256();
  };
  EXPECT_EQ(bits(Format::kFp8E4M3), 2048);
  EXPECT_EQ(bits(Format::kFp8E5M2), 2048);
  EXPECT_EQ(bits(Format::kFp8Block1x128), 2112);
  EXPECT_EQ(bits(Format::kFp8Block128x128), 2049);
  EXPECT_EQ(bits(Format::kMxfp8), 2112);
  EXPECT_EQ(bits(Format::kMxfp8E5M2), 2112);
  EXPECT_EQ(bits(Format::kNvfp4), 1032);
  EXPECT_EQ(bits(Format::kNvfp4, NvScaling::k1x16), 1152);
}

INSTANTIATE_TEST_SUITE_P(Kernels, BlocksTest, every_kernel(), kernel_name);

}  // namespace
}  // namespace tessera
