// For tests of quantised matrices: matrices and planes in guarded memory, with gaps between rows, and the formats'
// variants.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "codec/codec_testing.h"
#include "codec/quant/quantize_oracle.h"
#include "tessera/quantize.h"

namespace tessera {

inline constexpr DType kQuantizable[] = {DType::kF32, DType::kF16, DType::kBF16};
inline std::string dtype_name(const testing::TestParamInfo<DType>& info) {
  return std::string(to_string(info.param));
}
inline constexpr Plane kPlanes[] = {Plane::kRow, Plane::kColumn};

// Gaps in elements after each row of a matrix, in bytes after each row of a plane.
struct Spacing {
  int64_t gap = 0;
  size_t misalignment = 0;
};

// Runs `check` with each variant in turn: for tests whose oracle takes longer than all variants.
template <typename Check>
void with_every_kernel(Check check) {
  for (const std::string_view name : available_kernels()) {
    const ForcedKernel forced(name);
    SCOPED_TRACE(std::string(name));
    ASSERT_EQ(active_kernel(), name);
    check();
    if (testing::Test::HasFatalFailure()) return;
  }
}

class TestMatrix {
 public:
  TestMatrix(DType dtype, int64_t rows, int64_t columns, Spacing spacing = {})
      : dtype_(dtype),
        rows_(rows),
        columns_(columns),
        stride_(columns + spacing.gap),
        bytes_(rows == 0 ? 0 : static_cast<size_t>(bytes_of(dtype, (rows - 1) * stride_ + columns)),
               spacing.misalignment) {}

  DType dtype() const { return dtype_; }
  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }

  // Sets the bits, in the matrix's type.
  void set_bits(int64_t r, int64_t c, uint32_t bits) {
    std::memcpy(at(r, c), &bits, dtype_ == DType::kF32 ? 4 : 2);  // little-endian
  }
  void set(int64_t r, int64_t c, float x) {
    if (dtype_ == DType::kF32) return set_bits(r, c, std::bit_cast<uint32_t>(x));
    set_bits(r, c, (dtype_ == DType::kF16 ? f16_oracle() : bf16_oracle()).encode(double{x}));
  }
  void fill(float x) {
    for (int64_t r = 0; r < rows_; ++r)
      for (int64_t c = 0; c < columns_; ++c) set(r, c, x);
  }
  uint32_t bits(int64_t r, int64_t c) const {
    uint32_t value = 0;
    if (dtype_ == DType::kF32)
      std::memcpy(&value, at(r, c), 4);
    else
      std::memcpy(&value, at(r, c), 2);
    return value;
  }
  float get(int64_t r, int64_t c) const {
    if (dtype_ == DType::kF32) return std::bit_cast<float>(bits(r, c));
    return static_cast<float>((dtype_ == DType::kF16 ? f16_oracle() : bf16_oracle()).decode(bits(r, c)));
  }

  MatrixView view() const { return {bytes_.data(), dtype_, rows_, columns_, stride_}; }
  // The part of the matrix from this row and column on.
  MatrixView part(int64_t first_row, int64_t rows, int64_t first_column, int64_t columns) const {
    return {at(first_row, first_column), dtype_, rows, columns, stride_};
  }
  MatrixMemory memory() { return {bytes_.data(), dtype_, rows_, columns_, stride_}; }
  bool intact() const { return bytes_.intact(); }

  OracleMatrix oracle() const {
    OracleMatrix m{dtype_, rows_, columns_, {}};
    m.values.reserve(static_cast<size_t>(rows_ * columns_));
    for (int64_t r = 0; r < rows_; ++r)
      for (int64_t c = 0; c < columns_; ++c) m.values.push_back(get(r, c));
    return m;
  }

 private:
  std::byte* at(int64_t r, int64_t c) const {
    return bytes_.data() + (r * stride_ + c) * (dtype_ == DType::kF32 ? 4 : 2);
  }

  DType dtype_;
  int64_t rows_;
  int64_t columns_;
  int64_t stride_;
  mutable GuardedBytes bytes_;
};

inline float oracle_amax(const TestMatrix& m) {
  return oracle::amax(m.oracle());
}

// Magnitudes of many sizes, most near one, and zeros of both signs; finite in every type.
inline TestMatrix random_matrix(DType dtype, int64_t rows, int64_t columns, uint32_t seed, Spacing spacing = {}) {
  TestMatrix m(dtype, rows, columns, spacing);
  std::mt19937 random(seed);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      const auto bits = static_cast<uint32_t>(random());
      const double fraction = static_cast<double>(bits >> 12) / (1 << 20);
      const uint32_t kind = bits % 64;
      const int exponent = kind == 0 ? -24 : kind < 8 ? -6 : kind < 10 ? 4 : 0;
      const double magnitude = kind == 63 ? 0 : std::ldexp(fraction, exponent);
      m.set(r, c, static_cast<float>(bits & 64 ? -magnitude : magnitude));
    }
  }
  return m;
}

// A plane's memory: rows with gaps, which must not be written.
class TestPlane {
 public:
  TestPlane(const QuantSpec& spec, Plane plane, int64_t rows, int64_t columns, Spacing codes = {}, Spacing scales = {})
      : shape_(plane_shape(spec, plane, rows, columns)),
        code_stride_(shape_.code_row_bytes() + codes.gap),
        scale_stride_(shape_.scale_row_bytes() + scales.gap),
        codes_(span_of(shape_.code_rows, code_stride_, shape_.code_row_bytes()), codes.misalignment),
        scales_(span_of(shape_.scale_rows, scale_stride_, shape_.scale_row_bytes()), scales.misalignment) {}

  const PlaneShape& shape() const { return shape_; }
  PlaneMemory memory() { return {codes_.data(), code_stride_, scales_.data(), scale_stride_}; }
  ConstPlaneMemory source() { return {codes_.data(), code_stride_, scales_.data(), scale_stride_}; }

  void put(const OraclePlane& plane) {
    for (int64_t r = 0; r < shape_.code_rows; ++r)
      std::copy_n(plane.codes.begin() + r * shape_.code_row_bytes(), shape_.code_row_bytes(),
                  codes_.data() + r * code_stride_);
    for (int64_t r = 0; r < shape_.scale_rows; ++r)
      std::copy_n(plane.scales.begin() + r * shape_.scale_row_bytes(), shape_.scale_row_bytes(),
                  scales_.data() + r * scale_stride_);
  }
  OraclePlane get() {
    return {packed(codes_.data(), shape_.code_rows, code_stride_, shape_.code_row_bytes()),
            packed(scales_.data(), shape_.scale_rows, scale_stride_, shape_.scale_row_bytes())};
  }
  bool intact() {
    return codes_.intact() && scales_.intact() &&
           gaps_intact(codes_.data(), shape_.code_rows, code_stride_, shape_.code_row_bytes()) &&
           gaps_intact(scales_.data(), shape_.scale_rows, scale_stride_, shape_.scale_row_bytes());
  }

 private:
  static size_t span_of(int64_t rows, int64_t stride, int64_t row_bytes) {
    return rows == 0 ? 0 : static_cast<size_t>((rows - 1) * stride + row_bytes);
  }
  static std::vector<std::byte> packed(const std::byte* from, int64_t rows, int64_t stride, int64_t row_bytes) {
    std::vector<std::byte> bytes;
    for (int64_t r = 0; r < rows; ++r) bytes.insert(bytes.end(), from + r * stride, from + r * stride + row_bytes);
    return bytes;
  }
  static bool gaps_intact(const std::byte* from, int64_t rows, int64_t stride, int64_t row_bytes) {
    for (int64_t r = 0; r + 1 < rows; ++r)
      for (int64_t i = row_bytes; i < stride; ++i)
        if (from[r * stride + i] != std::byte{0xA5}) return false;
    return true;
  }

  PlaneShape shape_;
  int64_t code_stride_;
  int64_t scale_stride_;
  GuardedBytes codes_;
  GuardedBytes scales_;
};

inline Planes one_plane(Plane plane, PlaneMemory memory) {
  return plane == Plane::kRow ? Planes{memory, {}} : Planes{{}, memory};
}

// One plane, packed. `amax` is used for both planes.
inline OraclePlane quantized(const MatrixView& view, const QuantSpec& spec, Plane plane, float amax,
                             Parallel parallel = {}, const Origin& origin = {}) {
  TestPlane to(spec, plane, view.rows, view.columns);
  quantize(view, spec, {amax, amax}, one_plane(plane, to.memory()), parallel, origin);
  EXPECT_TRUE(to.intact());
  return to.get();
}

inline TestMatrix dequantized(const OraclePlane& from, const QuantSpec& spec, Plane plane, float amax, DType dtype,
                              int64_t rows, int64_t columns) {
  TestPlane source(spec, plane, rows, columns);
  source.put(from);
  TestMatrix to(dtype, rows, columns);
  dequantize(spec, plane, source.source(), amax, to.memory());
  EXPECT_TRUE(to.intact());
  return to;
}

// Every format, with both values of its option if it has one.
inline std::vector<QuantSpec> every_spec() {
  std::vector<QuantSpec> specs;
  for (const Format format : all_formats()) {
    QuantSpec spec;
    spec.format = format;
    specs.push_back(spec);
    if (format == Format::kNvfp4) spec.scaling = NvScaling::k1x16;
    if (format == Format::kFp8E4M3 || format == Format::kFp8E5M2) spec.power_of_two = true;
    if (format == Format::kFp8Block1x128 || format == Format::kFp8Block128x128) spec.power_of_two = false;
    if (spec != specs.back()) specs.push_back(spec);
  }
  return specs;
}

inline QuantSpec nvfp4_spec(NvScaling scaling) {
  QuantSpec spec;
  spec.format = Format::kNvfp4;
  spec.scaling = scaling;
  return spec;
}
inline QuantSpec spec_of(Format format) {
  QuantSpec spec;
  spec.format = format;
  return spec;
}
inline QuantSpec propagating(QuantSpec spec) {
  spec.nonfinite = Nonfinite::kPropagate;
  return spec;
}

// Whether pairs of 4-bit codes fill a plane's rows.
inline bool is_packable(const QuantSpec& spec, Plane plane, int64_t rows, int64_t columns) {
  return spec.format != Format::kNvfp4 || (plane == Plane::kRow ? columns : rows) % 2 == 0;
}

inline std::string describe(const QuantSpec& spec) {
  std::string text(to_string(spec.format));
  if (spec.format == Format::kNvfp4) text += spec.scaling == NvScaling::k16x16 ? " 16x16" : " 1x16";
  if (spec.hadamard) text += " hadamard";
  if (spec.rounding == Rounding::kStochastic) text += " stochastic";
  if (spec.power_of_two) text += *spec.power_of_two ? " power of two" : " any scale";
  return text;
}
inline std::string describe(const QuantSpec& spec, Plane plane, DType dtype, int64_t rows, int64_t columns) {
  return describe(spec) + ", " + std::string(to_string(plane)) + " plane of " + std::string(to_string(dtype)) + " [" +
         std::to_string(rows) + ", " + std::to_string(columns) + "]";
}

// Where two byte strings first differ; empty if they are equal.
inline std::string difference(const std::vector<std::byte>& got, const std::vector<std::byte>& want) {
  if (got == want) return "";
  if (got.size() != want.size()) return std::to_string(got.size()) + " bytes, not " + std::to_string(want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] != want[i])
      return "byte " + std::to_string(i) + " is " + std::to_string(static_cast<int>(got[i])) + ", not " +
             std::to_string(static_cast<int>(want[i]));
  }
  return "";
}
inline std::string difference(const OraclePlane& got, const OraclePlane& want) {
  const std::string scales = difference(got.scales, want.scales);
  if (!scales.empty()) return "scales: " + scales;
  const std::string codes = difference(got.codes, want.codes);
  return codes.empty() ? "" : "codes: " + codes;
}
// Compared bit by bit; NaN must be the canonical one of its type.
inline std::string difference(const TestMatrix& got, const OracleMatrix& want) {
  const uint32_t nan = got.dtype() == DType::kF32 ? 0x7FC00000 : got.dtype() == DType::kF16 ? 0x7E00 : 0x7FC0;
  for (int64_t r = 0; r < want.rows; ++r) {
    for (int64_t c = 0; c < want.columns; ++c) {
      const float g = got.get(r, c);
      const float w = want.at(r, c);
      const bool same =
          std::isnan(w) ? got.bits(r, c) == nan : std::bit_cast<uint32_t>(g) == std::bit_cast<uint32_t>(w);
      if (!same)
        return "[" + std::to_string(r) + ", " + std::to_string(c) + "] is " + std::to_string(g) + ", not " +
               std::to_string(w);
    }
  }
  return got.rows() == want.rows && got.columns() == want.columns ? "" : "another size";
}

}  // namespace tessera
