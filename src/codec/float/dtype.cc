#include "tessera/dtype.h"

#include <algorithm>
#include <array>
#include <string>

#include "base/fail.h"
#include "codec/float/same_name.h"

namespace tessera {
namespace {

struct DTypeInfo {
  DType dtype;
  int bits;
  std::string_view name;
  std::string_view torch_name;
  std::string_view others = {};  // separated by spaces
};

constexpr std::array kInfos{
    DTypeInfo{DType::kF64, 64, "f64", "float64", "fp64 double"},
    DTypeInfo{DType::kF32, 32, "f32", "float32", "fp32"},
    DTypeInfo{DType::kF16, 16, "f16", "float16", "fp16 half"},
    DTypeInfo{DType::kBF16, 16, "bf16", "bfloat16"},
    DTypeInfo{DType::kF8E4M3, 8, "f8_e4m3", "float8_e4m3fn", "float8_e4m3 fp8_e4m3"},
    DTypeInfo{DType::kF8E5M2, 8, "f8_e5m2", "float8_e5m2", "fp8_e5m2"},
    DTypeInfo{DType::kF8E8M0, 8, "f8_e8m0", "float8_e8m0fnu", "float8_e8m0 fp8_e8m0"},
    DTypeInfo{DType::kF4, 4, "f4", "float4_e2m1fn_x2", "float4_e2m1fn fp4"},
    DTypeInfo{DType::kI64, 64, "i64", "int64"},
    DTypeInfo{DType::kI32, 32, "i32", "int32"},
    DTypeInfo{DType::kI16, 16, "i16", "int16"},
    DTypeInfo{DType::kI8, 8, "i8", "int8"},
    DTypeInfo{DType::kU64, 64, "u64", "uint64"},
    DTypeInfo{DType::kU32, 32, "u32", "uint32"},
    DTypeInfo{DType::kU16, 16, "u16", "uint16"},
    DTypeInfo{DType::kU8, 8, "u8", "uint8"},
    DTypeInfo{DType::kBool, 8, "bool", "bool"},
    DTypeInfo{DType::kC64, 64, "c64", "complex64"},
};
constexpr size_t kCount = static_cast<size_t>(kLastDType) + 1;
static_assert(kInfos.size() == kCount);

constexpr auto kDTypes = [] {
  std::array<DType, kCount> dtypes{};
  for (size_t i = 0; i < kCount; ++i) dtypes[i] = kInfos[i].dtype;
  return dtypes;
}();
static_assert([] {
  for (size_t i = 0; i < kCount; ++i)
    if (static_cast<size_t>(kDTypes[i]) != i) return false;
  return true;
}());

const DTypeInfo& info_of(DType dtype) {
  TESSERA_CHECK_LT(static_cast<size_t>(dtype), kCount);
  return kInfos[static_cast<size_t>(dtype)];
}

bool is_among(std::string_view name, std::string_view names) {
  while (!names.empty()) {
    const size_t end = std::min(names.find(' '), names.size());
    if (codec::same_name(name, names.substr(0, end))) return true;
    names.remove_prefix(std::min(end + 1, names.size()));
  }
  return false;
}

}  // namespace

int bits_of(DType dtype) {
  return info_of(dtype).bits;
}

int64_t bytes_of(DType dtype, int64_t elements) {
  const int bits = bits_of(dtype);
  if (bits >= 8) return elements * (bits / 8);
  TESSERA_CHECK_EQ(elements * bits % 8, 0);
  return elements * bits / 8;
}

std::string_view to_string(DType dtype) {
  return info_of(dtype).name;
}

std::string_view torch_name(DType dtype) {
  return info_of(dtype).torch_name;
}

std::optional<DType> dtype_of(std::string_view name) {
  for (const DTypeInfo& info : kInfos)
    if (codec::same_name(name, info.name)) return info.dtype;
  return std::nullopt;
}

DType parse_dtype(std::string_view name) {
  constexpr std::string_view kModule = "torch.";
  const std::string_view plain = name.starts_with(kModule) ? name.substr(kModule.size()) : name;
  for (const DTypeInfo& info : kInfos)
    if (codec::same_name(plain, info.name) || codec::same_name(plain, info.torch_name) || is_among(plain, info.others))
      return info.dtype;
  const auto listed = [](std::string_view DTypeInfo::* member) {
    std::string names;
    for (const DTypeInfo& info : kInfos) names.append(names.empty() ? "" : ", ").append(info.*member);
    return names;
  };
  fail(ErrorCode::kInvalidArgument,
       "dtype '{}' is not one that Tessera moves: {}; or as torch and NumPy name them: {}"_message, name,
       listed(&DTypeInfo::name), listed(&DTypeInfo::torch_name));
}

std::span<const DType> all_dtypes() {
  return kDTypes;
}

bool is_integer(DType dtype) {
  return dtype >= DType::kI64 && dtype <= DType::kU8;
}

bool is_castable_float(DType dtype) {
  return dtype <= DType::kBF16;
}

}  // namespace tessera
