#include <algorithm>
#include <cstring>

#include "codec/simd/kernel_set.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/simd/reduce_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "codec/float/float_vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::codec::HWY_NAMESPACE {
#if TESSERA_SIMD_TARGET

// Loads elements of a type into the accumulator's type and stores them from it.
template <typename T>
struct Wide {
  using DAcc = DF;
  using Acc = float;
  static HWY_INLINE hn::Vec<DAcc> load(const std::byte* p) { return hn::BitCast(DF(), Lane<T>::load(p)); }
  static HWY_INLINE void store(hn::Vec<DAcc> value, std::byte* p) { Lane<T>::store(hn::BitCast(D(), value), p); }
};

template <>
struct Wide<F64> {
  using DAcc = D64;
  using Acc = double;
  static HWY_INLINE hn::Vec<DAcc> load(const std::byte* p) { return hn::LoadU(D64(), at<double>(p)); }
  static HWY_INLINE void store(hn::Vec<DAcc> value, std::byte* p) {
    const auto nan = hn::Set(D64(), std::bit_cast<double>(kNaNF64));
    hn::StoreU(hn::IfThenElse(hn::IsNaN(value), nan, value), D64(), at<double>(p));
  }
};

struct First {
  template <class Vec>
  static HWY_INLINE Vec apply(Vec /*acc*/, Vec x) {
    return x;
  }
};
struct VectorAdd {
  template <class Vec>
  static HWY_INLINE Vec apply(Vec acc, Vec x) {
    return hn::Add(acc, x);
  }
};
struct VectorMultiply {
  template <class Vec>
  static HWY_INLINE Vec apply(Vec acc, Vec x) {
    return hn::Mul(acc, x);
  }
};
struct VectorMinimum {
  template <class Vec>
  static HWY_INLINE Vec apply(Vec acc, Vec x) {
    return hn::IfThenElse(hn::Or(hn::Lt(x, acc), hn::IsNaN(x)), x, acc);
  }
};
struct VectorMaximum {
  template <class Vec>
  static HWY_INLINE Vec apply(Vec acc, Vec x) {
    return hn::IfThenElse(hn::Or(hn::Gt(x, acc), hn::IsNaN(x)), x, acc);
  }
};

// The parts that differ between types. They process `steps` vectors.
template <typename T, typename Op>
HWY_NOINLINE void accumulate_steps(const std::byte* src, std::byte* acc, size_t steps) {
  using W = Wide<T>;
  const typename W::DAcc d;
  for (; steps > 0;
       --steps, src += hn::Lanes(d) * sizeof(typename T::Bits), acc += hn::Lanes(d) * sizeof(typename W::Acc)) {
    auto* out = at<typename W::Acc>(acc);
    hn::StoreU(Op::apply(hn::LoadU(d, out), W::load(src)), d, out);
  }
}

template <typename T, bool kAverage>
HWY_NOINLINE void finish_steps(const std::byte* acc, std::byte* dst, size_t steps, int count) {
  using W = Wide<T>;
  const typename W::DAcc d;
  const auto divisor = hn::Set(d, static_cast<typename W::Acc>(count));
  for (; steps > 0;
       --steps, acc += hn::Lanes(d) * sizeof(typename W::Acc), dst += hn::Lanes(d) * sizeof(typename T::Bits)) {
    const auto value = hn::LoadU(d, at<typename W::Acc>(acc));
    W::store(kAverage ? hn::Div(value, divisor) : value, dst);
  }
}

inline constexpr size_t kVectorBytes = hn::MaxLanes(D()) * sizeof(int32_t);

template <typename T, typename Op>
void accumulate(const void* src, void* acc, size_t n) {
  using Acc = typename Wide<T>::Acc;
  constexpr size_t kFrom = sizeof(typename T::Bits);
  const size_t lanes = hn::Lanes(typename Wide<T>::DAcc());
  const size_t whole = n - n % lanes;
  const auto* in = static_cast<const std::byte*>(src);
  auto* out = static_cast<std::byte*>(acc);
  accumulate_steps<T, Op>(in, out, n / lanes);
  if (whole == n) return;
  HWY_ALIGN std::byte last_in[kVectorBytes] = {};
  HWY_ALIGN std::byte last_out[kVectorBytes] = {};
  std::memcpy(last_in, in + whole * kFrom, (n - whole) * kFrom);
  std::memcpy(last_out, out + whole * sizeof(Acc), (n - whole) * sizeof(Acc));
  accumulate_steps<T, Op>(last_in, last_out, 1);
  std::memcpy(out + whole * sizeof(Acc), last_out, (n - whole) * sizeof(Acc));
}

template <typename T, bool kAverage>
void finish(const void* acc, void* dst, size_t n, int count) {
  using Acc = typename Wide<T>::Acc;
  constexpr size_t kTo = sizeof(typename T::Bits);
  const size_t lanes = hn::Lanes(typename Wide<T>::DAcc());
  const size_t whole = n - n % lanes;
  const auto* in = static_cast<const std::byte*>(acc);
  auto* out = static_cast<std::byte*>(dst);
  HWY_ALIGN std::byte last_in[kVectorBytes] = {};
  HWY_ALIGN std::byte last_out[kVectorBytes];
  finish_steps<T, kAverage>(in, out, n / lanes, count);
  if (whole == n) return;
  std::memcpy(last_in, in + whole * sizeof(Acc), (n - whole) * sizeof(Acc));
  finish_steps<T, kAverage>(last_in, last_out, 1, count);
  std::memcpy(out + whole * kTo, last_out, (n - whole) * kTo);
}

template <typename... T>
ReduceKernels make_kernels(TypeList<T...>) {
  return {.target = hwy::TargetName(HWY_TARGET),
          .first = {accumulate<T, First>...},
          .next = {{accumulate<T, VectorAdd>...},
                   {accumulate<T, VectorAdd>...},
                   {accumulate<T, VectorMinimum>...},
                   {accumulate<T, VectorMaximum>...},
                   {accumulate<T, VectorMultiply>...}},
          .finish = {finish<T, false>...},
          .finish_average = {finish<T, true>...}};
}

const ReduceKernels& reduce_kernels() {
  static const ReduceKernels kernels = make_kernels(ReducedTypes{});
  return kernels;
}

#else
const ReduceKernels& reduce_kernels() {
  return scalar_reduce();
}
#endif
}  // namespace tessera::codec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::codec {

HWY_EXPORT(reduce_kernels);
const ReduceKernels& simd_reduce(int64_t target) {
  return TESSERA_CALL_TARGET(reduce_kernels, target);
}

}  // namespace tessera::codec
#endif
