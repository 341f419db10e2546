// Element types, named as safetensors names them (https://github.com/huggingface/safetensors), in lower case.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace tessera {

enum class DType : uint8_t {
  kF64,
  kF32,
  kF16,
  kBF16,
  kF8E4M3,
  kF8E5M2,
  kF8E8M0,  // 8-bit floats of the OCP formats; E8M0 is a bare power of two
  kF4,      // E2M1, two elements a byte, the even one in the low nibble
  kI64,
  kI32,
  kI16,
  kI8,
  kU64,
  kU32,
  kU16,
  kU8,
  kBool,
  kC64,  // complex64: two f32
};
inline constexpr DType kLastDType = DType::kC64;

int bits_of(DType dtype);  // 4 for kF4, else a multiple of 8
// Bytes of `elements`, packed. REQUIRES: they fill whole bytes.
int64_t bytes_of(DType dtype, int64_t elements);
std::string_view to_string(DType dtype);   // "f32", "bf16", "f8_e4m3", "f8_e5m2", "f8_e8m0", "f4", "i64", "bool", "c64"
std::string_view torch_name(DType dtype);  // "float32", "float8_e4m3fn": what torch, NumPy and ml_dtypes call it
std::optional<DType> dtype_of(std::string_view name);  // the names of to_string(), any case
// Of what users write: those names, torch's and NumPy's ("float32", "torch.float32"), and the short ones of both worlds
// ("fp32", "half"). Throws Error(kInvalidArgument) that lists the names.
DType parse_dtype(std::string_view name);
std::span<const DType> all_dtypes();

bool is_integer(DType dtype);         // signed or unsigned, not bool
bool is_castable_float(DType dtype);  // f64, f32, f16, bf16: dtypes of a plain cast on the bus

}  // namespace tessera
