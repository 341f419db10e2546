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
  std::string_view name;
  int bits;
};

constexpr std::array kInfos{
    DTypeInfo{DType::kF64, "f64", 64},       DTypeInfo{DType::kF32, "f32", 32},
    DTypeInfo{DType::kF16, "f16", 16},       DTypeInfo{DType::kBF16, "bf16", 16},
    DTypeInfo{DType::kF8E4M3, "f8_e4m3", 8}, DTypeInfo{DType::kF8E5M2, "f8_e5m2", 8},
    DTypeInfo{DType::kF8E8M0, "f8_e8m0", 8}, DTypeInfo{DType::kF4, "f4", 4},
    DTypeInfo{DType::kI64, "i64", 64},       DTypeInfo{DType::kI32, "i32", 32},
    DTypeInfo{DType::kI16, "i16", 16},       DTypeInfo{DType::kI8, "i8", 8},
    DTypeInfo{DType::kU64, "u64", 64},       DTypeInfo{DType::kU32, "u32", 32},
    DTypeInfo{DType::kU16, "u16", 16},       DTypeInfo{DType::kU8, "u8", 8},
    DTypeInfo{DType::kBool, "bool", 8},      DTypeInfo{DType::kC64, "c64", 64},
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

std::optional<DType> dtype_of(std::string_view name) {
  for (const DTypeInfo& info : kInfos)
    if (codec::same_name(name, info.name)) return info.dtype;
  return std::nullopt;
}

DType parse_dtype(std::string_view name) {
  if (const auto dtype = dtype_of(name)) return *dtype;
  std::string names;
  for (const DTypeInfo& info : kInfos) names.append(names.empty() ? "" : ", ").append(info.name);
  fail(ErrorCode::kInvalidArgument, "unknown dtype '{}': use one of {}"_message, name, names);
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
