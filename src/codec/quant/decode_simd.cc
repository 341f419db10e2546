#include <algorithm>
#include <cstring>
#include <type_traits>

#include "codec/simd/kernel_set.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/quant/decode_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "codec/float/float_vec-inl.h"
#include "codec/quant/scaled_runs-inl.h"
#include "codec/simd/stream-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::codec::HWY_NAMESPACE {
#if TESSERA_SIMD_TARGET

struct TwoVectors {
  VF low;
  VF high;
};

// `replacement` where value > limit, as signed numbers.
HWY_INLINE V16 replaced_above(V16 value, uint32_t limit, uint32_t replacement, V16 otherwise) {
  const D16S d;
  return hn::BitCast(D16(), hn::IfThenElse(greater(value, words(limit)), hn::BitCast(d, words(replacement)),
                                           hn::BitCast(d, otherwise)));
}

#if TESSERA_F16_INSTRUCTIONS
// Two vectors of codes as f16, which are their values times kF16Scale; NaNs are not. The instructions that widen f16
// treat subnormal numbers like others.
template <typename Code>
struct AsF16 {  // E5M2 is an f16 without its last bits
  static constexpr float kF16Scale = 1;
  static constexpr uint32_t kMagnitude = 0x7FFF;
  static constexpr uint32_t kLargest = kF16Format.infinity();  // larger magnitudes are NaNs
  static HWY_INLINE V16 load(const std::byte* p) {
    const hn::Rebind<uint8_t, D16> bytes;
    return hn::ShiftLeft<8>(hn::PromoteTo(D16(), hn::LoadU(bytes, at<uint8_t>(p))));
  }
};
template <>
struct AsF16<E4M3> {  // with the exponent bits of an f16 below its bias
  static constexpr int kShift = kF16Format.mantissa_bits - kE4M3Format.mantissa_bits;
  static constexpr float kF16Scale = power_of_two(kE4M3Format.bias() - kF16Format.bias());
  static constexpr uint32_t kMagnitude = kE4M3Format.nan << kShift;
  static constexpr uint32_t kLargest = kMagnitude - 1;
  static HWY_INLINE V16 load(const std::byte* p) {
    const D16S d;
    const hn::Rebind<int8_t, D16S> bytes;
    const auto extended = hn::PromoteTo(d, hn::LoadU(bytes, at<int8_t>(p)));  // the sign is also in the bits above it
    return hn::And(hn::BitCast(D16(), hn::ShiftLeft<kShift>(extended)), words(0x8000 | kMagnitude));
  }
};
template <>
struct AsF16<E2M1> {
  static constexpr float kF16Scale = 1;
  static HWY_INLINE V16 load(const std::byte* p) {
    using DPairs = hn::RebindToUnsigned<D>;
    const hn::Rebind<uint8_t, DPairs> bytes;
    const hn::Repartition<uint8_t, D> table;
    // The high bytes of the f16; the low ones are 0.
    alignas(16) static constexpr uint8_t kHighBytes[16] = {0x00, 0x38, 0x3C, 0x3E, 0x40, 0x42, 0x44, 0x46,
                                                           0x80, 0xB8, 0xBC, 0xBE, 0xC0, 0xC2, 0xC4, 0xC6};
    const auto pairs = hn::PromoteTo(DPairs(), hn::LoadU(bytes, at<uint8_t>(p)));
    const auto spread =
        hn::And(hn::Or(hn::ShiftLeft<8>(pairs), hn::ShiftLeft<20>(pairs)), hn::Set(DPairs(), 0x0F000F00));
    return hn::BitCast(D16(), hn::TableLookupBytes(hn::LoadDup128(table, kHighBytes), hn::BitCast(table, spread)));
  }
};

// `nan` where a code is NaN.
template <typename Code>
HWY_INLINE V16 with_nans(V16 f16, uint32_t nan, V16 otherwise) {
  return replaced_above(hn::And(f16, words(AsF16<Code>::kMagnitude)), AsF16<Code>::kLargest, nan, otherwise);
}

HWY_INLINE TwoVectors widened(V16 f16) {
  const hn::Half<D16> half;
  const hn::Rebind<hwy::float16_t, D> d;
  return {hn::PromoteTo(DF(), hn::BitCast(d, hn::LowerHalf(half, f16))),
          hn::PromoteTo(DF(), hn::BitCast(d, hn::UpperHalf(half, f16)))};
}

template <typename Code>
HWY_INLINE TwoVectors load_pair(const std::byte* p) {
  V16 f16 = AsF16<Code>::load(p);
  if constexpr (std::is_same_v<Code, E4M3>) f16 = with_nans<Code>(f16, kNaNF16, f16);
  const TwoVectors two = widened(f16);
  if constexpr (AsF16<Code>::kF16Scale == 1) {
    return two;
  } else {
    const VF inverse = hn::Set(DF(), 1 / AsF16<Code>::kF16Scale);
    return {hn::Mul(two.low, inverse), hn::Mul(two.high, inverse)};
  }
}
#else
template <typename Code>
HWY_INLINE V load_codes(const std::byte* p) {
  if constexpr (kPackedPairs<Code>) {
    using DPairs = hn::RepartitionToWide<hn::RebindToUnsigned<D>>;
    const hn::Rebind<uint8_t, DPairs> bytes;
    const hn::Rebind<uint32_t, DPairs> wide;
    const auto pairs = hn::PromoteTo(DPairs(), hn::PromoteTo(wide, hn::LoadU(bytes, at<uint8_t>(p))));
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

template <typename Code>
HWY_INLINE TwoVectors load_pair(const std::byte* p) {
  return {hn::BitCast(DF(), load_codes<Code>(p)),
          hn::BitCast(DF(), load_codes<Code>(p + code_bytes<Code>(hn::Lanes(D()))))};
}
#endif

// `kStream`: past the caches, to an aligned address.
template <bool kStream, class Tag, typename T>
HWY_INLINE void store_vector(Tag d, hn::Vec<Tag> value, T* p) {
  if constexpr (kStream) {
    hn::Stream(value, d, p);
  } else {
    hn::StoreU(value, d, p);
  }
}

// Stores products: their NaNs are quiet, as those of all arithmetic.
template <typename To, bool kStream>
HWY_INLINE void store_products(const TwoVectors& two, std::byte* p) {
  if constexpr (std::is_same_v<To, F32>) {
    const auto store = [](VF value, std::byte* to) HWY_ATTR {
      const VF nan = hn::BitCast(DF(), bits(kNaNF32));
      store_vector<kStream>(DF(), hn::IfThenElse(hn::IsNaN(value), nan, value), at<float>(to));
    };
    store(two.low, p);
    store(two.high, p + hn::Lanes(D()) * sizeof(float));
  } else if constexpr (std::is_same_v<To, BF16>) {
    const V16 low = hn::BitCast(D16(), two.low);
    const V16 high = hn::BitCast(D16(), two.high);
    const V16 kept = hn::ConcatOdd(D16(), high, low);
    const V16 dropped = hn::ConcatEven(D16(), high, low);
    // Up if what is dropped is more than half, or half and what is kept is odd.
    const V16 excess = hn::SaturatedSub(hn::SaturatedAdd(dropped, hn::And(kept, words(1))), words(0x8000));
    const V16 rounded = hn::Add(kept, hn::Min(excess, words(1)));
    const V16 magnitude = hn::And(kept, words(0x7FFF));
    store_vector<kStream>(D16(), replaced_above(magnitude, kInfF32 >> 16, kNaNBF16, rounded), at<uint16_t>(p));
  } else {
#if TESSERA_F16_INSTRUCTIONS
    const hn::Rebind<hwy::float16_t, D> half;
    const hn::Half<D16> half_words;
    const V16 both = hn::Combine(D16(), hn::BitCast(half_words, hn::DemoteTo(half, two.high)),
                                 hn::BitCast(half_words, hn::DemoteTo(half, two.low)));
    const V16 magnitude = hn::And(both, words(0x7FFF));
    store_vector<kStream>(D16(), replaced_above(magnitude, kF16Format.infinity(), kNaNF16, both), at<uint16_t>(p));
#else
    Lane<F16>::store(hn::BitCast(D(), two.low), p);
    Lane<F16>::store(hn::BitCast(D(), two.high), p + hn::Lanes(D()) * sizeof(uint16_t));
#endif
  }
}

template <typename Code, typename To, bool kStream>
struct Decode {
  static constexpr size_t in_bytes(size_t n) { return code_bytes<Code>(n); }
  static constexpr size_t out_bytes(size_t n) { return n * sizeof(typename To::Bits); }
  static HWY_INLINE void step(const std::byte* in, VF first, VF second, std::byte* out) {
    const TwoVectors values = load_pair<Code>(in);
    store_products<To, kStream>({hn::Mul(values.low, first), hn::Mul(values.high, second)}, out);
  }
};

#if TESSERA_F16_INSTRUCTIONS
// To bf16 by powers of two: the products are exact, so nothing has to be rounded.
template <typename Code, bool kStream>
struct DecodeByPowers {
  static constexpr size_t in_bytes(size_t n) { return code_bytes<Code>(n); }
  static constexpr size_t out_bytes(size_t n) { return n * sizeof(BF16::Bits); }
  static HWY_INLINE void step(const std::byte* in, VF first, VF second, std::byte* out) {
    const VF inverse = hn::Set(DF(), 1 / AsF16<Code>::kF16Scale);
    const V16 f16 = AsF16<Code>::load(in);
    const TwoVectors values = widened(f16);
    const V16 low = hn::BitCast(D16(), hn::Mul(values.low, hn::Mul(first, inverse)));
    const V16 high = hn::BitCast(D16(), hn::Mul(values.high, hn::Mul(second, inverse)));
    store_vector<kStream>(D16(), with_nans<Code>(f16, kNaNBF16, hn::ConcatOdd(D16(), high, low)), at<uint16_t>(out));
  }
};
template <typename Code, typename To>
inline constexpr bool kByPowers = std::is_same_v<To, BF16> && !kPackedPairs<Code>;
template <typename Code, typename To, bool kStream>
using OpByPowers = std::conditional_t<kByPowers<Code, To>, DecodeByPowers<Code, kStream>, Decode<Code, To, kStream>>;
#else
template <typename Code, typename To, bool kStream>
using OpByPowers = Decode<Code, To, kStream>;
#endif

template <typename Op>
void decode_row(const std::byte* codes, size_t n, size_t block, const float* scales, void* dst) {
  run<Op>(codes, n, block, scales, dst);
}

struct RowKind {
  DecodeRow row;
  DecodeRow stream_row;  // of whole steps, to an aligned address
  size_t codes;          // bytes of kPiece codes
  size_t elements;       // bytes of kPiece elements
};
inline constexpr size_t kPiece = 1024;  // whole blocks and steps

// Steps are streamed from registers. Rows at unaligned addresses are decoded into a buffer in the first-level cache and
// streamed from there.
HWY_NOINLINE void decode_row_stream(const RowKind& kind, const std::byte* codes, size_t n, size_t block,
                                    const float* scales, std::byte* out) {
  const auto scales_at = [&](size_t i) { return block == kWholeRow ? scales : scales + i / block; };
  if (to_line(out) == 0) {
    const size_t whole = n - n % step_lanes();
    kind.stream_row(codes, whole, block, scales, out);
    if (whole < n)
      kind.row(codes + whole * kind.codes / kPiece, n - whole, block, scales_at(whole),
               out + whole * kind.elements / kPiece);
    return;
  }
  alignas(kLine) std::byte buffer[kPiece * sizeof(float)];
  for (size_t i = 0; i < n; i += kPiece, codes += kind.codes, out += kind.elements) {
    const size_t count = std::min(kPiece, n - i);
    kind.row(codes, count, block, scales_at(i), buffer);
    stream_bytes(out, buffer, count * kind.elements / kPiece);
  }
}

template <typename Op, typename StreamOp>
void decode_row_stream(const std::byte* codes, size_t n, size_t block, const float* scales, void* dst) {
  static constexpr RowKind kKind{.row = decode_row<Op>,
                                 .stream_row = decode_row<StreamOp>,
                                 .codes = Op::in_bytes(kPiece),
                                 .elements = Op::out_bytes(kPiece)};
  decode_row_stream(kKind, codes, n, block, scales, static_cast<std::byte*>(dst));
}

template <typename Code, typename To>
void set_pair(DecodeKernels& kernels, size_t code, size_t to) {
  kernels.row[code][to] = decode_row<Decode<Code, To, false>>;
  kernels.stream_row[code][to] = decode_row_stream<Decode<Code, To, false>, Decode<Code, To, true>>;
  kernels.row_by_powers[code][to] = decode_row<OpByPowers<Code, To, false>>;
  kernels.stream_row_by_powers[code][to] = decode_row_stream<OpByPowers<Code, To, false>, OpByPowers<Code, To, true>>;
}

template <typename Code, typename... To>
void set_code(DecodeKernels& kernels, size_t code, TypeList<To...>) {
  size_t to = 0;
  (set_pair<Code, To>(kernels, code, to++), ...);
}

template <typename... Code>
DecodeKernels make_kernels(TypeList<Code...>) {
  DecodeKernels kernels{.target = hwy::TargetName(HWY_TARGET),
                        .row = {},
                        .stream_row = {},
                        .row_by_powers = {},
                        .stream_row_by_powers = {}};
  size_t code = 0;
  (set_code<Code>(kernels, code++, QuantizedTypes{}), ...);
  return kernels;
}

const DecodeKernels& decode_kernels() {
  static const DecodeKernels kernels = make_kernels(CodeTypes{});
  return kernels;
}

#else
const DecodeKernels& decode_kernels() {
  return scalar_decode();
}
#endif
}  // namespace tessera::codec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::codec {

HWY_EXPORT(decode_kernels);
const DecodeKernels& simd_decode(int64_t target) {
  return TESSERA_CALL_TARGET(decode_kernels, target);
}

}  // namespace tessera::codec
#endif
