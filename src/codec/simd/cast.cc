#include "codec/simd/cast.h"

#include <cstdint>
#include <cstring>

#include "base/fail.h"
#include "codec/simd/kernel_set.h"
#include "codec/simd/stream.h"

namespace tessera {
namespace {

using Copy = void (*)(void* dst, const void* src, size_t n);

void copy_cached(void* dst, const void* src, size_t n) {
  if (n != 0) std::memcpy(dst, src, n);
}

template <size_t kBits, Copy kCopy>
void copy_row(const void* src, void* dst, size_t n) {
  kCopy(dst, src, n * kBits / 8);
}

template <Copy kCopy>
CastRow copy_row_of(int bits) {
  switch (bits) {
    case 4:
      return copy_row<4, kCopy>;
    case 8:
      return copy_row<8, kCopy>;
    case 16:
      return copy_row<16, kCopy>;
    case 32:
      return copy_row<32, kCopy>;
    default:
      return copy_row<64, kCopy>;
  }
}

bool is_cast_float(DType dtype) {
  return static_cast<size_t>(dtype) < codec::kFloatTypes;
}

void check_castable(DType from, DType to) {
  if (!castable(from, to))
    fail(ErrorCode::kInvalidArgument,
         "cannot cast {} to {}: casts are between f64, f32, f16, bf16, f8_e4m3 and f8_e5m2"_message, to_string(from),
         to_string(to));
}

}  // namespace

bool castable(DType from, DType to) {
  return from == to || (is_cast_float(from) && is_cast_float(to));
}

CastRow cast_row(DType from, DType to) {
  check_castable(from, to);
  if (from == to) return copy_row_of<copy_cached>(bits_of(from));
  return codec::active_kernels().cast->row[static_cast<size_t>(from)][static_cast<size_t>(to)];
}

CastRow cast_row_stream(DType from, DType to) {
  check_castable(from, to);
  if (from == to) return copy_row_of<copy_stream>(bits_of(from));
  return codec::active_kernels().cast->stream_row[static_cast<size_t>(from)][static_cast<size_t>(to)];
}

}  // namespace tessera
