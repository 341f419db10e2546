#include <algorithm>
#include <bit>
#include <cstring>

#include "base/fail.h"
#include "codec/float/float_bits.h"
#include "tessera/checkpoint.h"

namespace tessera {
namespace {

template <typename T>
T load(const std::byte* data, int64_t element) {
  T value;
  std::memcpy(&value, data + element * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

uint8_t load_nibble(const std::byte* data, int64_t element) {
  const auto byte = std::to_integer<uint8_t>(data[element / 2]);
  return element % 2 == 0 ? byte & 0xF : byte >> 4;
}

template <typename Bits>
std::string with_bits(double value, Bits bits) {
  return fmt::format("{:.9g} (0x{:0{}x})", value, bits, 2 * sizeof(Bits));
}

std::string e8m0_to_string(uint8_t code) {
  return code == 255 ? "nan (0xff)" : fmt::format("2^{} (0x{:02x})", code - 127, code);
}

// The global indices of the element at `position` of a packed local tensor.
std::vector<Index> global_index(const Region& region, Index position) {
  std::vector<Index> index(static_cast<size_t>(region.ndim()));
  for (int d = region.ndim() - 1; d >= 0; --d) {
    const IntervalSet& owned = region.dim(d);
    const Index local = position % owned.size();
    position /= owned.size();
    index[static_cast<size_t>(d)] = owned.slice(local, local + 1).intervals().front().begin;
  }
  return index;
}

bool same_element(DType dtype, const std::byte* a, const std::byte* b, int64_t element) {
  if (dtype == DType::kF4) return load_nibble(a, element) == load_nibble(b, element);
  const int64_t bytes = bytes_of(dtype, 1);
  return std::memcmp(a + element * bytes, b + element * bytes, static_cast<size_t>(bytes)) == 0;
}

}  // namespace

std::string element_to_string(DType dtype, const std::byte* data, int64_t element) {
  const auto u8 = [&] { return load<uint8_t>(data, element); };
  const auto u16 = [&] { return load<uint16_t>(data, element); };
  switch (dtype) {
    case DType::kF64: {
      const auto bits = load<uint64_t>(data, element);
      return fmt::format("{:.17g} (0x{:016x})", std::bit_cast<double>(bits), bits);
    }
    case DType::kF32: {
      const auto bits = load<uint32_t>(data, element);
      return with_bits(std::bit_cast<float>(bits), bits);
    }
    case DType::kF16:
      return with_bits(f32_from_f16(u16()), u16());
    case DType::kBF16:
      return with_bits(f32_from_bf16(u16()), u16());
    case DType::kF8E4M3:
      return with_bits(f32_from_e4m3(u8()), u8());
    case DType::kF8E5M2:
      return with_bits(f32_from_e5m2(u8()), u8());
    case DType::kF8E8M0:
      return e8m0_to_string(u8());
    case DType::kF4: {
      const uint8_t code = load_nibble(data, element);
      return fmt::format("{} (0x{:x})", f32_from_e2m1(code), code);
    }
    case DType::kI64:
      return fmt::format("{}", load<int64_t>(data, element));
    case DType::kI32:
      return fmt::format("{}", load<int32_t>(data, element));
    case DType::kI16:
      return fmt::format("{}", load<int16_t>(data, element));
    case DType::kI8:
      return fmt::format("{}", load<int8_t>(data, element));
    case DType::kU64:
      return fmt::format("{}", load<uint64_t>(data, element));
    case DType::kU32:
      return fmt::format("{}", load<uint32_t>(data, element));
    case DType::kU16:
      return fmt::format("{}", u16());
    case DType::kU8:
      return fmt::format("{}", u8());
    case DType::kBool:
      return u8() > 1 ? fmt::format("0x{:02x}", u8()) : u8() == 1 ? "true" : "false";
    case DType::kC64:
      return fmt::format("{:.9g}{:+.9g}i (0x{:016x})", load<float>(data, 2 * element),
                         load<float>(data, 2 * element + 1), load<uint64_t>(data, element));
  }
  fail_internal("no text for dtype code {}", static_cast<int>(dtype));
}

std::optional<Difference> first_difference(DType dtype, const Region& region, std::span<const std::byte> expected,
                                           std::span<const std::byte> actual) {
  const auto bytes = static_cast<size_t>(bytes_of(dtype, region.size()));
  TESSERA_CHECK_EQ(expected.size(), bytes);
  TESSERA_CHECK_EQ(actual.size(), bytes);
  if (bytes == 0 || std::memcmp(expected.data(), actual.data(), bytes) == 0) return std::nullopt;

  Difference difference;
  for (Index element = 0; element < region.size(); ++element) {
    if (same_element(dtype, expected.data(), actual.data(), element)) continue;
    if (difference.elements++ > 0) continue;
    difference.index = global_index(region, element);
    difference.expected = element_to_string(dtype, expected.data(), element);
    difference.actual = element_to_string(dtype, actual.data(), element);
  }
  return difference;
}

std::string Difference::to_string() const {
  return fmt::format("[{}] is {}, expected {}; {} element{} differ{}"_message, fmt::join(index, ","), actual, expected,
                     elements, elements == 1 ? "" : "s", elements == 1 ? "s" : "");
}

}  // namespace tessera
