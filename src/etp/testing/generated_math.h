// The mathematics of the random models: what runs sharded and what does not call the same functions on whole weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "codec/simd/cast.h"
#include "etp/schedule/weight_format.h"
#include "tessera/etp.h"

namespace tessera::etp::generated {

using Floats = std::vector<float>;

inline uint64_t mixed(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
  uint64_t x = a * 0x9E3779B97F4A7C15 ^ (b + 1) * 0xBF58476D1CE4E5B9 ^ (c + 1) * 0x94D049BB133111EB ^
               (d + 1) * 0xD6E8FEB86659FD93;
  x ^= x >> 31;
  x *= 0xBF58476D1CE4E5B9;
  return x ^ x >> 29;
}

inline float initial_value(uint32_t weight, int64_t index) {
  return static_cast<float>(static_cast<int>(mixed(weight, static_cast<uint64_t>(index), 7, 0) % 2001) - 1000) * 0.001F;
}

inline Floats to_floats(const void* data, DType dtype, size_t n) {
  Floats values(n);
  cast_row(dtype, DType::kF32)(data, values.data(), n);
  return values;
}

// The model's mathematics, on a whole weight. What runs sharded and what does not call the same.
inline float forward(const Floats& weight, float input) {
  float sum = 0;
  for (size_t i = 0; i < weight.size(); ++i) sum += weight[i] * static_cast<float>(static_cast<int>(i % 5) - 2);
  return input * 0.5F + sum * 0.01F;
}

inline float backward(const Floats& weight, float above) {
  return above * 0.5F + weight.front() + weight.back() * 0.25F;
}

inline Floats gradient_of(size_t elements, float output, float above, int rank) {
  Floats gradient(elements);
  for (size_t i = 0; i < elements; ++i)
    gradient[i] = above * static_cast<float>(i % 3) + output * 0.125F + static_cast<float>(rank) * 0.01F;
  return gradient;
}

inline float stepped(float weight, float gradient) {
  return weight - gradient * 0.03125F;
}

inline float input_of(int rank, int step, int micro_batch) {
  return static_cast<float>(
             mixed(static_cast<uint64_t>(rank), static_cast<uint64_t>(step), static_cast<uint64_t>(micro_batch), 3) %
             97) *
         0.03F;
}

inline Floats rounded(Floats values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * 4);
  cast_row(DType::kF32, dtype)(values.data(), bytes.data(), values.size());
  return to_floats(bytes.data(), dtype, values.size());
}

inline DType compute_of(const WeightSpec& spec) {
  const WeightFormat format = spec.format.empty() ? WeightFormat(spec.dtype) : WeightFormat::parse(spec.format);
  return spec.compute.value_or(format.quantised() ? spec.dtype : format.dtype());
}
inline DType gradient_dtype_of(const WeightSpec& spec) {
  return spec.gradient.value_or(compute_of(spec));
}

}  // namespace tessera::etp::generated
