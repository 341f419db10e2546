// For tests: the quantised formats by their formulas (docs/formats/quantized.md), implemented independently of the code
// under test. Floats are found by table search, each step is a loop over all elements of the whole matrix, and planes
// of the transposed matrix are made by transposing it.
#pragma once

#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "codec/element_oracle.h"
#include "tessera/quantize.h"

namespace tessera {

struct OracleMatrix {
  DType dtype = DType::kF32;  // in which the values are exact
  int64_t rows = 0;
  int64_t columns = 0;
  std::vector<float> values;

  float at(int64_t r, int64_t c) const { return values[static_cast<size_t>(r * columns + c)]; }
};

struct OraclePlane {
  std::vector<std::byte> codes;  // without gaps
  std::vector<std::byte> scales;

  friend bool operator==(const OraclePlane&, const OraclePlane&) = default;
};

namespace oracle {

inline OracleMatrix transpose(const OracleMatrix& m) {
  OracleMatrix t{m.dtype, m.columns, m.rows, {}};
  t.values.reserve(m.values.size());
  for (int64_t c = 0; c < m.columns; ++c)
    for (int64_t r = 0; r < m.rows; ++r) t.values.push_back(m.at(r, c));
  return t;
}

// Ignores NaN.
inline float amax(const OracleMatrix& m) {
  float largest = 0;
  for (const float x : m.values)
    if (std::fabs(x) > largest) largest = std::fabs(x);
  return largest;
}

// Scales --------------------------------------------------------------------------------------------------------------

struct Scale {
  float multiplier = 1;  // of the elements
  uint32_t stored = 0;   // the plane's stored scale, in the low bytes
};

inline uint32_t f32_bits(float x) {
  uint32_t bits = 0;
  std::memcpy(&bits, &x, sizeof(x));
  return bits;
}
inline void append(std::vector<std::byte>& bytes, uint32_t value, size_t size) {
  for (size_t i = 0; i < size; ++i, value /= 256) bytes.push_back(static_cast<std::byte>(value % 256));
}

inline Scale nvfp4_scale(float amax, float block) {
  float s_enc = std::min(2688.0F / amax, FLT_MAX);
  if (amax == 0 || s_enc == 0) s_enc = 1;
  const float s_dec = 1.0F / s_enc;
  const float factor = s_enc * (1.0F / 6.0F);
  const float wanted = std::min(block * factor, FLT_MAX);
  const uint32_t d8 = e4m3_oracle().encode(double{wanted});
  const float product = static_cast<float>(e4m3_oracle().decode(d8)) * s_dec;
  return {std::min(1.0F / product, FLT_MAX), d8};
}

inline Scale mxfp8_scale(Format format, float block) {
  const float reciprocal = 1.0F / largest_fp8(format);
  const uint8_t e = e8m0(block * reciprocal);
  return {e8m0_inverse(e), e};
}

// Without the mantissa; subnormal numbers have only a mantissa.
inline float power_of_two_below(float x) {
  if (x < FLT_MIN) return 0;
  int exponent = 0;
  std::frexp(x, &exponent);
  return std::ldexp(1.0F, exponent - 1);
}

// `if_infinite`: replaces a scale that overflows.
inline Scale fp8_scale(const QuantSpec& spec, float amax, bool power_of_two, float if_infinite) {
  const float floored = std::max(amax, spec.eps);
  float scale = 1;
  if (floored != 0 && std::isfinite(floored)) {
    const float top = static_cast<float>(std::ldexp(double{largest_fp8(spec.format)}, -spec.margin));
    scale = top / floored;
    if (std::isinf(scale)) scale = if_infinite;
    if (power_of_two) scale = power_of_two_below(scale);
  }
  return {scale, f32_bits(1.0F / scale)};
}

// {0, 0}: one block for all. In the plane's own rows and columns.
inline BlockShape block_of(const QuantSpec& spec) {
  switch (spec.format) {
    case Format::kFp8E4M3:
    case Format::kFp8E5M2:
      return {0, 0};
    case Format::kFp8Block1x128:
      return {1, 128};
    case Format::kFp8Block128x128:
      return {128, 128};
    case Format::kMxfp8:
    case Format::kMxfp8E5M2:
      return {1, 32};
    default:
      return spec.scaling == NvScaling::k16x16 ? BlockShape{16, 16} : BlockShape{1, 16};
  }
}

inline Scale scale_of(const QuantSpec& spec, DType input, float amax, float block) {
  switch (spec.format) {
    case Format::kFp8E4M3:
    case Format::kFp8E5M2:
      return fp8_scale(spec, amax, spec.power_of_two.value_or(false), FLT_MAX);
    case Format::kFp8Block1x128:
    case Format::kFp8Block128x128:
      return fp8_scale(spec, block, spec.power_of_two.value_or(true), largest_of(input));
    case Format::kMxfp8:
    case Format::kMxfp8E5M2:
      return mxfp8_scale(spec.format, block);
    default:
      return nvfp4_scale(amax, block);
  }
}

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
// The number of scales in an [rows, columns] plane: NVFP4 repeats those of square blocks.
inline std::array<int64_t, 2> scales_of(const QuantSpec& spec, int64_t rows, int64_t columns) {
  const BlockShape block = block_of(spec);
  if (block.rows == 0) return {1, 1};
  return {spec.format == Format::kNvfp4 ? rows : ceil_div(rows, block.rows), ceil_div(columns, block.columns)};
}

// Planes --------------------------------------------------------------------------------------------------------------

// Along the rows of `m`: 16-point Sylvester / 4, with signs, rounded to bf16.
inline OracleMatrix hadamard(const OracleMatrix& m) {
  constexpr int kSigns[16] = {1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1};
  OracleMatrix result = m;
  for (int64_t r = 0; r < m.rows; ++r) {
    for (int64_t c = 0; c < m.columns; ++c) {
      const int64_t j = c % 16;
      float sum = 0;
      for (int64_t i = 0; i < 16; ++i) {
        int sign = kSigns[i];
        for (int64_t both = 1; both < 16; both *= 2)
          if (i / both % 2 == 1 && j / both % 2 == 1) sign = -sign;
        const float term = m.at(r, c - j + i) * static_cast<float>(sign) * 0.25F;
        sum = sum + term;
      }
      result.values[static_cast<size_t>(r * m.columns + c)] =
          static_cast<float>(bf16_oracle().decode(bf16_oracle().encode(double{sum})));
    }
  }
  return result;
}

// The input of a plane: elements in the order of its codes.
inline OracleMatrix plane_input(const OracleMatrix& m, const QuantSpec& spec, Plane plane) {
  if (plane == Plane::kRow) return m;
  return spec.hadamard ? hadamard(transpose(m)) : transpose(m);
}

inline std::vector<std::byte> transpose_bytes(const std::vector<std::byte>& from, int64_t rows, int64_t columns) {
  std::vector<std::byte> to;
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t r = 0; r < rows; ++r) to.push_back(from[static_cast<size_t>(r * columns + c)]);
  return to;
}

inline bool is_mxfp8(Format format) {
  return format == Format::kMxfp8 || format == Format::kMxfp8E5M2;
}

}  // namespace oracle

// One code for each element, in the order of the plane's input.
inline std::vector<uint8_t> oracle_codes(const OracleMatrix& x, const QuantSpec& spec, Plane plane,
                                         const std::vector<oracle::Scale>& scales, const Origin& origin) {
  const BlockShape block = oracle::block_of(spec);
  const int64_t across = block.rows == 0 ? 1 : oracle::ceil_div(x.columns, block.columns);
  const bool of_row = plane == Plane::kRow;
  const int64_t first_row = of_row ? origin.first_row : origin.first_column;
  const int64_t first_column = of_row ? origin.first_column : origin.first_row;
  const int64_t whole = of_row ? origin.columns : origin.rows;
  std::vector<uint8_t> codes;
  codes.reserve(x.values.size());
  for (int64_t r = 0; r < x.rows; ++r) {
    for (int64_t c = 0; c < x.columns; ++c) {
      const int64_t b = block.rows == 0 ? 0 : r / block.rows * across + c / block.columns;
      const float y = x.at(r, c) * scales[static_cast<size_t>(b)].multiplier;
      if (spec.format != Format::kNvfp4) {
        codes.push_back(static_cast<uint8_t>(oracle::fp8(spec.format).encode(double{y})));
      } else if (spec.rounding == Rounding::kNearest) {
        codes.push_back(oracle::e2m1(y));
      } else {
        const int64_t row_elements = whole == 0 ? x.columns : whole;
        const int64_t g = origin.first_element + (first_row + r) * row_elements + first_column + c;
        codes.push_back(oracle::e2m1_stochastic(y, oracle::draw(spec.seed, plane, static_cast<uint64_t>(g))));
      }
    }
  }
  return codes;
}

inline OraclePlane oracle_quantize(const OracleMatrix& matrix, const QuantSpec& spec, Plane plane, float amax,
                                   const Origin& origin = {}) {
  const OracleMatrix x = oracle::plane_input(matrix, spec, plane);
  const BlockShape block = oracle::block_of(spec);
  const int64_t across = block.rows == 0 ? 1 : oracle::ceil_div(x.columns, block.columns);
  const int64_t down = block.rows == 0 ? 1 : oracle::ceil_div(x.rows, block.rows);

  std::vector<float> amaxes(static_cast<size_t>(across * down));
  for (int64_t r = 0; r < x.rows && block.rows != 0; ++r) {
    for (int64_t c = 0; c < x.columns; ++c) {
      float& largest = amaxes[static_cast<size_t>(r / block.rows * across + c / block.columns)];
      if (std::fabs(x.at(r, c)) > largest) largest = std::fabs(x.at(r, c));
    }
  }
  std::vector<oracle::Scale> scales;
  for (const float largest : amaxes) scales.push_back(oracle::scale_of(spec, matrix.dtype, amax, largest));
  const std::vector<uint8_t> codes = oracle_codes(x, spec, plane, scales, origin);

  OraclePlane result;
  const size_t scale_bytes = spec.format == Format::kNvfp4 || oracle::is_mxfp8(spec.format) ? 1 : 4;
  const auto [scale_rows, scale_columns] = oracle::scales_of(spec, x.rows, x.columns);
  for (int64_t r = 0; r < scale_rows; ++r) {
    for (int64_t c = 0; c < scale_columns; ++c) {
      const int64_t from = scale_rows == down ? r : r / block.rows;
      oracle::append(result.scales, scales[static_cast<size_t>(from * across + c)].stored, scale_bytes);
    }
  }
  if (spec.format == Format::kNvfp4) {
    for (size_t i = 0; i + 1 < codes.size(); i += 2)
      result.codes.push_back(static_cast<std::byte>(codes[i] + 16 * codes[i + 1]));
  } else {
    for (const uint8_t code : codes) result.codes.push_back(static_cast<std::byte>(code));
  }
  if (oracle::is_mxfp8(spec.format) && plane == Plane::kColumn) {  // kept as the matrix lies
    result.codes = oracle::transpose_bytes(result.codes, x.rows, x.columns);
    result.scales = oracle::transpose_bytes(result.scales, scale_rows, scale_columns);
  }
  return result;
}

// Values of a plane as a [rows, columns] matrix in `dtype`.
inline OracleMatrix oracle_dequantize(const OraclePlane& from, const QuantSpec& spec, Plane plane, float amax,
                                      DType dtype, int64_t rows, int64_t columns) {
  const bool mx = oracle::is_mxfp8(spec.format);
  const bool turned = plane == Plane::kColumn;
  const BlockShape block = oracle::block_of(spec);
  const bool repeated = spec.format == Format::kNvfp4;
  OracleMatrix result{dtype, rows, columns, {}};
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      // Position in the plane that is quantised along its rows.
      const int64_t pr = turned ? c : r;
      const int64_t pc = turned ? r : c;
      const int64_t width = turned ? rows : columns;
      const int64_t element = mx ? r * columns + c : pr * width + pc;
      int64_t s = 0;
      if (block.rows != 0) {
        const int64_t sr = repeated ? pr : pr / block.rows;
        const int64_t sc = pc / block.columns;
        s = mx && turned ? sc * columns + sr : sr * oracle::ceil_div(width, block.columns) + sc;
      }
      float value;
      if (repeated) {
        const auto pair = static_cast<unsigned>(from.codes[static_cast<size_t>(element / 2)]);
        const auto code = static_cast<uint8_t>(element % 2 == 0 ? pair % 16 : pair / 16);
        const auto d8 = static_cast<uint32_t>(from.scales[static_cast<size_t>(s)]);
        const float product = static_cast<float>(e4m3_oracle().decode(d8)) * amax;
        const float scale = product * (1.0F / 2688.0F);
        value = oracle::e2m1_value(code) * scale;
      } else {
        const auto code = static_cast<uint32_t>(from.codes[static_cast<size_t>(element)]);
        float scale = 0;
        if (mx)
          scale = oracle::e8m0_value(static_cast<uint8_t>(from.scales[static_cast<size_t>(s)]));
        else
          std::memcpy(&scale, &from.scales[static_cast<size_t>(4 * s)], 4);
        value = static_cast<float>(oracle::fp8(spec.format).decode(code)) * scale;
      }
      if (dtype != DType::kF32) {
        const FloatOracle& type = dtype == DType::kF16 ? f16_oracle() : bf16_oracle();
        value = static_cast<float>(type.decode(type.encode(double{value})));
      }
      result.values.push_back(value);
    }
  }
  return result;
}

}  // namespace tessera
