#include <algorithm>
#include <cstring>
#include <type_traits>

#include "codec/float/philox.h"
#include "codec/simd/kernel_set.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/quant/quantize_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "codec/float/float_vec-inl.h"
#include "codec/quant/power_codes-inl.h"
#include "codec/quant/scaled_runs-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::codec::HWY_NAMESPACE {
#if TESSERA_SIMD_TARGET

template <typename From>
HWY_INLINE VF load_floats(const std::byte* p) {
  return hn::BitCast(DF(), Lane<From>::load(p));
}

// The operation on two vectors of elements. `kExact`: products have no more than eight bits.
template <typename From, typename Code, bool kExact>
struct Encode {
  static constexpr size_t in_bytes(size_t n) { return n * sizeof(typename From::Bits); }
  static constexpr size_t out_bytes(size_t n) { return code_bytes<Code>(n); }
  static HWY_INLINE void step(const std::byte* in, VF first, VF second, std::byte* out) {
    const VF low = hn::Mul(load_floats<From>(in), first);
    const VF high = hn::Mul(load_floats<From>(in + in_bytes(hn::Lanes(D()))), second);
    store_two<Code, kExact>(hn::BitCast(D(), low), hn::BitCast(D(), high), out);
  }
};

template <typename From, typename Code, bool kExact>
void encode_row(const void* src, size_t n, size_t block, const float* multipliers, std::byte* codes) {
  run<Encode<From, Code, kExact>>(src, n, block, multipliers, codes);
}

// bf16 by powers of two where PowerCodes applies; the rest in f32.
inline constexpr size_t kGroup = 128;  // elements that are encoded together or left

// `offset_at(i)`: for the vector that begins at the group's element i. False if the group is left.
template <typename Code, typename OffsetAt>
HWY_INLINE bool encode_group(const std::byte* in, const OffsetAt& offset_at, std::byte* out) {
  const D16 d;
  const hn::Rebind<uint8_t, D16> bytes;
  Mask16 any = hn::MaskFromVec(hn::Zero(D16S()));
  HWY_DEFAULT_UNROLL
  for (size_t i = 0; i < kGroup; i += hn::MaxLanes(d)) {
    Mask16 left;
    const V16 codes = PowerCodes<Code>::encode(hn::LoadU(d, at<uint16_t>(in) + i), offset_at(i), left);
    hn::StoreU(hn::TruncateTo(bytes, codes), bytes, at<uint8_t>(out) + i);
    any = hn::Or(any, left);
  }
  return hn::AllFalse(D16S(), any);
}

template <typename Code>
using EncodeExact = Encode<BF16, Code, true>;

template <typename Code, size_t kBlock>
HWY_NOINLINE void encode_blocks_by_powers(const std::byte* in, size_t n, const float* multipliers, std::byte* out) {
  using Rest = EncodeExact<Code>;
  constexpr size_t kPiece = 4096;  // elements
  HWY_ALIGN uint16_t offsets[kPiece / kBlock + hn::MaxLanes(D())];
  for (size_t first = 0; first < n; first += kPiece) {
    const size_t count = std::min(kPiece, n - first);
    const float* m = multipliers + first / kBlock;
    const bool finite = PowerCodes<Code>::offsets(m, (count + kBlock - 1) / kBlock, offsets);
    size_t i = 0;
    for (; finite && i + kGroup <= count; i += kGroup) {
      const std::byte* from = in + Rest::in_bytes(first + i);
      const uint16_t* group = offsets + i / kBlock;
      const auto offset_at = [group](size_t j) HWY_ATTR { return hn::Set(D16(), group[j / kBlock]); };
      if (!encode_group<Code>(from, offset_at, out + first + i))
        run<Rest>(from, kGroup, kBlock, m + i / kBlock, out + first + i);
    }
    if (i < count) run<Rest>(in + Rest::in_bytes(first + i), count - i, kBlock, m + i / kBlock, out + first + i);
  }
}

template <typename Code>
void encode_by_powers(const void* src, size_t n, size_t block, const float* multipliers, std::byte* codes) {
  const auto* in = static_cast<const std::byte*>(src);
  if (block == 32) return encode_blocks_by_powers<Code, 32>(in, n, multipliers, codes);
  if (block == 128) return encode_blocks_by_powers<Code, 128>(in, n, multipliers, codes);
  run<EncodeExact<Code>>(src, n, block, multipliers, codes);
}

// Rows with one multiplier for each column.
template <typename From, typename Code, bool kExact>
HWY_INLINE void run_columns(const std::byte* src, size_t stride, size_t rows, size_t n, const float* multipliers,
                            std::byte* codes, ptrdiff_t code_stride) {
  for (size_t r = 0; r < rows; ++r)
    run_each<Encode<From, Code, kExact>>(src + r * stride, n, multipliers,
                                         codes + static_cast<ptrdiff_t>(r) * code_stride);
}

template <typename From, typename Code, bool kExact>
void encode_columns(const std::byte* src, size_t stride, size_t rows, size_t n, const float* multipliers,
                    std::byte* codes, ptrdiff_t code_stride) {
  run_columns<From, Code, kExact>(src, stride, rows, n, multipliers, codes, code_stride);
}

template <typename Code>
void encode_columns_by_powers(const std::byte* src, size_t stride, size_t rows, size_t n, const float* multipliers,
                              std::byte* codes, ptrdiff_t code_stride) {
  using Rest = EncodeExact<Code>;
  constexpr size_t kPiece = 1024;  // elements
  HWY_ALIGN uint16_t offsets[kPiece + hn::MaxLanes(D())];
  for (size_t first = 0; first < n; first += kPiece) {
    const size_t count = std::min(kPiece, n - first);
    const bool finite = PowerCodes<Code>::offsets(multipliers + first, count, offsets);
    for (size_t r = 0; r < rows; ++r) {
      const std::byte* in = src + r * stride + Rest::in_bytes(first);
      std::byte* out = codes + static_cast<ptrdiff_t>(r) * code_stride + first;
      size_t i = 0;
      for (; finite && i + kGroup <= count; i += kGroup) {
        const std::byte* from = in + Rest::in_bytes(i);
        const uint16_t* group = offsets + i;
        const auto offset_at = [group](size_t j) HWY_ATTR { return hn::Load(D16(), group + j); };
        if (!encode_group<Code>(from, offset_at, out + i))
          run_each<Rest>(from, kGroup, multipliers + first + i, out + i);
      }
      if (i < count) run_each<Rest>(in + Rest::in_bytes(i), count - i, multipliers + first + i, out + i);
    }
  }
}

template <typename From, typename Code>
constexpr EncodeColumns encode_columns_by_powers_of() {
  if constexpr (std::is_same_v<From, BF16> && !kPackedPairs<Code>) {
    return encode_columns_by_powers<Code>;
  } else {
    return encode_columns<From, Code, false>;
  }
}

template <typename From, typename Code>
constexpr EncodeRow encode_row_by_powers() {
  if constexpr (std::is_same_v<From, BF16> && !kPackedPairs<Code>) {
    return encode_by_powers<Code>;
  } else {
    return encode_row<From, Code, false>;
  }
}

// Random bytes of whole groups of 16 elements.
inline constexpr size_t kDrawn = 16;
using D64U = hn::ScalableTag<uint64_t>;
using V64 = hn::Vec<D64U>;

HWY_INLINE V64 product(V64 a, uint32_t b) {
  const hn::Repartition<uint32_t, D64U> halves;
  return hn::MulEven(hn::BitCast(halves, a), hn::BitCast(halves, hn::Set(D64U(), b)));
}

// philox() for as many consecutive groups as there are 64-bit lanes.
HWY_INLINE void random_groups(const Draw& draw, uint64_t group, uint8_t* bytes) {
  const hn::Rebind<uint32_t, D64U> words;
  const V64 low = hn::Set(D64U(), 0xFFFFFFFF);
  const V64 groups = hn::Add(hn::Set(D64U(), group), hn::Iota(D64U(), 0));
  V64 c0 = hn::And(groups, low);
  V64 c1 = hn::ShiftRight<32>(groups);
  V64 c2 = hn::Set(D64U(), draw.plane);
  V64 c3 = hn::Zero(D64U());
  auto key0 = static_cast<uint32_t>(draw.seed);
  auto key1 = static_cast<uint32_t>(draw.seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const V64 first = product(c0, kPhiloxMultipliers[0]);
    const V64 second = product(c2, kPhiloxMultipliers[1]);
    c0 = hn::Xor(hn::Xor(hn::ShiftRight<32>(second), c1), hn::Set(D64U(), key0));
    c2 = hn::Xor(hn::Xor(hn::ShiftRight<32>(first), c3), hn::Set(D64U(), key1));
    c1 = hn::And(second, low);
    c3 = hn::And(first, low);
    key0 += kPhiloxWeyl[0];
    key1 += kPhiloxWeyl[1];
  }
  HWY_ALIGN uint32_t columns[4][hn::MaxLanes(D64U())];
  hn::Store(hn::TruncateTo(words, c0), words, columns[0]);
  hn::Store(hn::TruncateTo(words, c1), words, columns[1]);
  hn::Store(hn::TruncateTo(words, c2), words, columns[2]);
  hn::Store(hn::TruncateTo(words, c3), words, columns[3]);
  for (size_t lane = 0; lane < hn::Lanes(D64U()); ++lane) {
    for (size_t word = 0; word < 4; ++word)
      std::memcpy(bytes + lane * kDrawn + word * sizeof(uint32_t), &columns[word][lane], sizeof(uint32_t));
  }
}

// The value of e2m1_stochastic(), for a vector.
HWY_INLINE V round_stochastically(VF y, VF random) {
  const auto step = [](VF a) HWY_ATTR {
    const VF low = hn::IfThenElse(hn::Ge(a, hn::Set(DF(), 2.0F)), hn::Set(DF(), 1.0F), hn::Set(DF(), 0.5F));
    return hn::IfThenElse(hn::Ge(a, hn::Set(DF(), 4.0F)), hn::Set(DF(), 2.0F), low);
  };
  const V y_bits = hn::BitCast(D(), y);
  const VF a = hn::Min(hn::Abs(y), hn::Set(DF(), kLargestE2M1));
  const VF t = hn::Add(hn::Mul(hn::Mul(random, hn::Set(DF(), 1.0F / 256.0F)), step(a)), a);
  const VF t_step = step(t);
  const VF floor = hn::ConvertTo(DF(), hn::ConvertTo(D(), hn::Div(t, t_step)));
  const VF q = hn::Min(hn::Mul(floor, t_step), hn::Set(DF(), kLargestE2M1));
  const V sign = hn::And(y_bits, bits(0x80000000));
  return where(is_nan(y_bits), y_bits, hn::Or(hn::BitCast(D(), q), sign));
}

template <typename From>
void encode_stochastic(const void* src, size_t n, size_t block, const float* multipliers, const Draw& draw,
                       std::byte* codes) {
  constexpr size_t kChunk = 256;  // elements; whole blocks of up to 128
  const hn::Rebind<uint8_t, D> bytes;
  HWY_ALIGN uint8_t random[kChunk + 2 * kDrawn * hn::MaxLanes(D64U())];
  HWY_ALIGN std::byte last_in[kChunk * sizeof(float)];
  HWY_ALIGN std::byte last_out[kChunk / 2];
  for (size_t first = 0; first < n; first += kChunk) {
    const size_t count = std::min(kChunk, n - first);
    const uint64_t element = draw.first_element + first;
    const uint64_t group = element / kDrawn;
    const size_t offset = element % kDrawn;
    for (size_t filled = 0; filled < offset + count; filled += kDrawn * hn::Lanes(D64U()))
      random_groups(draw, group + filled / kDrawn, random + filled);
    const std::byte* in = static_cast<const std::byte*>(src) + first * sizeof(typename From::Bits);
    std::byte* out = codes + first / 2;
    if (count < kChunk) {
      std::memcpy(last_in, in, count * sizeof(typename From::Bits));
      std::memset(last_in + count * sizeof(typename From::Bits), 0, (kChunk - count) * sizeof(typename From::Bits));
      in = last_in;
      out = last_out;
    }
    const auto rounded = [&](size_t i) HWY_ATTR {
      const VF multiplier = hn::Set(DF(), multipliers[std::min(first + i, n - 1) / block]);
      const V drawn = hn::PromoteTo(D(), hn::LoadU(bytes, random + offset + i));
      const VF y = hn::Mul(load_floats<From>(in + i * sizeof(typename From::Bits)), multiplier);
      return round_stochastically(y, hn::ConvertTo(DF(), drawn));
    };
    for (size_t i = 0; i < count; i += step_lanes())
      store_two<E2M1, true>(rounded(i), rounded(i + hn::Lanes(D())), out + i / 2);
    if (count < kChunk) std::memcpy(codes + first / 2, last_out, count / 2);
  }
}

template <typename Code, typename... T>
void set_code(QuantizeKernels& kernels, size_t code, TypeList<T...>) {
  size_t type = 0;
  ((kernels.encode[type][code] = encode_row<T, Code, false>,
    kernels.encode_by_powers[type][code] = encode_row_by_powers<T, Code>(),
    kernels.encode_columns[type][code] = encode_columns_by_powers_of<T, Code>(), ++type),
   ...);
}

template <typename... Code, typename... T>
QuantizeKernels make_kernels(TypeList<Code...>, TypeList<T...> types) {
  QuantizeKernels kernels{.target = hwy::TargetName(HWY_TARGET),
                          .encode = {},
                          .encode_by_powers = {},
                          .encode_columns = {},
                          .encode_stochastic = {encode_stochastic<T>...}};
  size_t code = 0;
  (set_code<Code>(kernels, code++, types), ...);
  return kernels;
}

const QuantizeKernels& quantize_kernels() {
  static const QuantizeKernels kernels = make_kernels(CodeTypes{}, QuantizedTypes{});
  return kernels;
}

#else
const QuantizeKernels& quantize_kernels() {
  return scalar_quantize();
}
#endif
}  // namespace tessera::codec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::codec {

HWY_EXPORT(quantize_kernels);
const QuantizeKernels& simd_quantize(int64_t target) {
  return TESSERA_CALL_TARGET(quantize_kernels, target);
}

}  // namespace tessera::codec
#endif
