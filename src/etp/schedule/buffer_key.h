// Which buffers are interchangeable: those with equal keys. Values; thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "etp/schedule/chains.h"
#include "etp/schedule/weight_format.h"

namespace tessera::etp {

enum class BufferUse : uint8_t { kGather, kReduce };

struct BufferKey {
  int64_t rows = 0;  // of the whole weight, padded as its shards are
  int64_t columns = 0;
  WeightFormat format{};                        // what is gathered; of a reduction, the gradient's dtype
  std::optional<Plane> plane = std::nullopt;    // of a quantised format; none of a plain dtype
  std::optional<DType> decoded = std::nullopt;  // of a gather that dequantises, or casts, on the way
  BufferUse use = BufferUse::kGather;
  int32_t expert = -1;  // its index in a list of experts; -1: no expert
  Chain chain = Chain::kUngraphed;
  uint32_t group = 0;  // the caller's index of the ETP group

  // Elements of `decoded`, or of a plain dtype; else codes, scales and amax, each part at a multiple of 64 bytes.
  int64_t bytes() const;
  friend bool operator==(const BufferKey&, const BufferKey&) = default;
};

// The buffer of one gathered plane of [rows, columns]. `used`: row in forward, column in backward. It is part of the
// key only where the format is quantised: the direction. `decoded`: where the GEMM reads elements of that dtype.
BufferKey gather_key(int64_t padded_rows, int64_t columns, const WeightFormat& format, Plane used,
                     std::optional<DType> decoded);

// "gather 64x4096 nvfp4 row as bf16, expert 3, GRAPHED, group 0"
std::string to_string(const BufferKey& key);

}  // namespace tessera::etp

template <>
struct std::hash<tessera::etp::BufferKey> {
  size_t operator()(const tessera::etp::BufferKey& key) const noexcept;
};
