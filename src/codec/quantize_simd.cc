#include <algorithm>
#include <cstring>
#include <type_traits>

#include "codec/kernel_set.h"
#include "codec/philox.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/quantize_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "codec/float_vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::codec::HWY_NAMESPACE {
#if TESSERA_SIMD_TARGET

using VF = hn::Vec<DF>;
using DPairs = hn::RepartitionToWide<hn::RebindToUnsigned<D>>;
inline constexpr size_t kLongestBlock = 128;

template <typename Code>
constexpr size_t code_bytes(size_t n) {
  return std::is_same_v<Code, E2M1> ? n / 2 : n;
}

// A vector of codes, in the low bits of its lanes.
template <typename Code>
HWY_INLINE void store_codes(V codes, std::byte* p) {
  if constexpr (std::is_same_v<Code, E2M1>) {
    const hn::Rebind<uint8_t, DPairs> bytes;
    const auto pairs = hn::BitCast(DPairs(), codes);  // the odd code, 32 bits up, comes down beside the even one
    hn::StoreU(hn::TruncateTo(bytes, hn::Or(pairs, hn::ShiftRight<28>(pairs))), bytes, at<uint8_t>(p));
  } else {
    const hn::Rebind<uint8_t, D> bytes;
    hn::StoreU(hn::DemoteTo(bytes, codes), bytes, at<uint8_t>(p));
  }
}

template <typename Code>
HWY_INLINE V load_values(const std::byte* p) {
  if constexpr (std::is_same_v<Code, E2M1>) {
    const hn::Rebind<uint8_t, DPairs> bytes;
    const hn::Rebind<uint32_t, DPairs> words;
    const auto pairs = hn::PromoteTo(DPairs(), hn::PromoteTo(words, hn::LoadU(bytes, at<uint8_t>(p))));
    const V spread = hn::BitCast(D(), hn::Or(pairs, hn::ShiftLeft<28>(pairs)));
    const V magnitude = hn::And(spread, bits(7));
    const V sign = hn::ShiftLeft<28>(hn::And(spread, bits(8)));
    const V normal = hn::ShiftLeft<22>(hn::Add(magnitude, bits(126 << 1)));
    const V half = where(hn::Eq(magnitude, bits(1)), bits(0x3F000000), hn::Zero(D()));
    return hn::Or(sign, where(hn::Lt(magnitude, bits(2)), half, normal));
  } else {
    return Lane<Code>::load(p);
  }
}

template <typename From>
HWY_INLINE VF load_floats(const std::byte* p) {
  return hn::BitCast(DF(), Lane<From>::load(p));
}

// What is done with a vector of elements: to codes, and back.
template <typename From, typename Code>
struct Encode {
  static constexpr size_t in_bytes(size_t n) { return n * sizeof(typename From::Bits); }
  static constexpr size_t out_bytes(size_t n) { return code_bytes<Code>(n); }
  static HWY_INLINE void step(const std::byte* in, VF multiplier, std::byte* out) {
    store_codes<Code>(encode<Code>(hn::BitCast(D(), hn::Mul(load_floats<From>(in), multiplier))), out);
  }
};

template <typename Code, typename To>
struct Decode {
  static constexpr size_t in_bytes(size_t n) { return code_bytes<Code>(n); }
  static constexpr size_t out_bytes(size_t n) { return n * sizeof(typename To::Bits); }
  static HWY_INLINE void step(const std::byte* in, VF multiplier, std::byte* out) {
    Lane<To>::store(hn::BitCast(D(), hn::Mul(hn::BitCast(DF(), load_values<Code>(in)), multiplier)), out);
  }
};

// Whole vectors that share a multiplier.
template <typename Op>
HWY_INLINE void run_vectors(const std::byte* in, size_t n, VF multiplier, std::byte* out) {
  const size_t lanes = hn::Lanes(D());
  for (size_t i = 0; i < n; i += lanes) Op::step(in + Op::in_bytes(i), multiplier, out + Op::out_bytes(i));
}

// Any number of elements, up to a vector; `multipliers` is one, or one for each.
template <typename Op>
HWY_INLINE void run_tail(const std::byte* in, size_t n, VF multiplier, std::byte* out) {
  HWY_ALIGN std::byte last_in[hn::MaxLanes(D()) * sizeof(float)] = {};
  HWY_ALIGN std::byte last_out[hn::MaxLanes(D()) * sizeof(float)];
  std::memcpy(last_in, in, Op::in_bytes(n));
  Op::step(last_in, multiplier, last_out);
  std::memcpy(out, last_out, Op::out_bytes(n));
}

template <typename Op>
HWY_INLINE void run_shared(const std::byte* in, size_t n, float multiplier, std::byte* out) {
  const VF shared = hn::Set(DF(), multiplier);
  const size_t whole = n - n % hn::Lanes(D());
  run_vectors<Op>(in, whole, shared, out);
  if (whole < n) run_tail<Op>(in + Op::in_bytes(whole), n - whole, shared, out + Op::out_bytes(whole));
}

template <typename Op>
HWY_INLINE void run_each(const std::byte* in, size_t n, const float* multipliers, std::byte* out) {
  const size_t lanes = hn::Lanes(D());
  size_t i = 0;
  for (; i + lanes <= n; i += lanes)
    Op::step(in + Op::in_bytes(i), hn::LoadU(DF(), multipliers + i), out + Op::out_bytes(i));
  if (i == n) return;
  HWY_ALIGN float last[hn::MaxLanes(D())] = {};
  std::memcpy(last, multipliers + i, (n - i) * sizeof(float));
  run_tail<Op>(in + Op::in_bytes(i), n - i, hn::LoadU(DF(), last), out + Op::out_bytes(i));
}

template <typename Op, size_t kBlock>
HWY_INLINE void run_blocks(const std::byte* in, size_t n, const float* multipliers, std::byte* out) {
  const size_t whole = n - n % kBlock;
  for (size_t i = 0; i < whole; i += kBlock)
    run_vectors<Op>(in + Op::in_bytes(i), kBlock, hn::Set(DF(), *multipliers++), out + Op::out_bytes(i));
  if (whole < n) run_shared<Op>(in + Op::in_bytes(whole), n - whole, *multipliers, out + Op::out_bytes(whole));
}

template <typename Op>
void run(const void* src, size_t n, size_t block, const float* multipliers, void* dst) {
  const auto* in = static_cast<const std::byte*>(src);
  auto* out = static_cast<std::byte*>(dst);
  switch (block) {
    case kEach:
      return run_each<Op>(in, n, multipliers, out);
    case 16:
      return run_blocks<Op, 16>(in, n, multipliers, out);
    case 32:
      return run_blocks<Op, 32>(in, n, multipliers, out);
    case kLongestBlock:
      return run_blocks<Op, kLongestBlock>(in, n, multipliers, out);
    default:
      return run_shared<Op>(in, n, *multipliers, out);
  }
}

template <typename From, typename Code>
void encode_row(const void* src, size_t n, size_t block, const float* multipliers, std::byte* codes) {
  run<Encode<From, Code>>(src, n, block, multipliers, codes);
}

template <typename Code, typename To>
void decode_row(const std::byte* codes, size_t n, size_t block, const float* scales, void* dst) {
  run<Decode<Code, To>>(codes, n, block, scales, dst);
}

// Random bytes of whole groups of 16 elements.
inline constexpr size_t kGroup = 16;
using D64U = hn::ScalableTag<uint64_t>;
using V64 = hn::Vec<D64U>;

HWY_INLINE V64 product(V64 a, uint32_t b) {
  const hn::Repartition<uint32_t, D64U> halves;
  return hn::MulEven(hn::BitCast(halves, a), hn::BitCast(halves, hn::Set(D64U(), b)));
}

// philox() of as many consecutive groups as there are lanes of 64 bits.
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
      std::memcpy(bytes + lane * kGroup + word * sizeof(uint32_t), &columns[word][lane], sizeof(uint32_t));
  }
}

// e2m1_stochastic() of a vector.
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
  return where(is_nan(y_bits), bits(kNaNE2M1), encode<E2M1>(hn::Or(hn::BitCast(D(), q), sign)));
}

template <typename From>
void encode_stochastic(const void* src, size_t n, size_t block, const float* multipliers, const Draw& draw,
                       std::byte* codes) {
  constexpr size_t kChunk = 256;  // elements; whole blocks of up to 128
  const hn::Rebind<uint8_t, D> bytes;
  HWY_ALIGN uint8_t random[kChunk + 2 * kGroup * hn::MaxLanes(D64U())];
  HWY_ALIGN std::byte last_in[kChunk * sizeof(float)];
  HWY_ALIGN std::byte last_out[kChunk / 2];
  for (size_t first = 0; first < n; first += kChunk) {
    const size_t count = std::min(kChunk, n - first);
    const uint64_t element = draw.first_element + first;
    const uint64_t group = element / kGroup;
    const size_t offset = element % kGroup;
    for (size_t filled = 0; filled < offset + count; filled += kGroup * hn::Lanes(D64U()))
      random_groups(draw, group + filled / kGroup, random + filled);
    const std::byte* in = static_cast<const std::byte*>(src) + first * sizeof(typename From::Bits);
    std::byte* out = codes + first / 2;
    if (count < kChunk) {
      std::memcpy(last_in, in, count * sizeof(typename From::Bits));
      std::memset(last_in + count * sizeof(typename From::Bits), 0, (kChunk - count) * sizeof(typename From::Bits));
      in = last_in;
      out = last_out;
    }
    for (size_t i = 0; i < count; i += hn::Lanes(D())) {
      const VF multiplier = hn::Set(DF(), multipliers[(first + i) / block]);
      const V drawn = hn::PromoteTo(D(), hn::LoadU(bytes, random + offset + i));
      const VF y = hn::Mul(load_floats<From>(in + i * sizeof(typename From::Bits)), multiplier);
      store_codes<E2M1>(round_stochastically(y, hn::ConvertTo(DF(), drawn)), out + i / 2);
    }
    if (count < kChunk) std::memcpy(codes + first / 2, last_out, count / 2);
  }
}

template <typename Code, typename... T>
void set_code(QuantizeKernels& kernels, size_t code, TypeList<T...>) {
  size_t type = 0;
  ((kernels.encode[type][code] = encode_row<T, Code>, kernels.decode[code][type] = decode_row<Code, T>, ++type), ...);
}

template <typename... Code, typename... T>
QuantizeKernels make_kernels(TypeList<Code...>, TypeList<T...> types) {
  QuantizeKernels kernels{.target = hwy::TargetName(HWY_TARGET),
                          .encode = {},
                          .encode_stochastic = {encode_stochastic<T>...},
                          .decode = {}};
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
