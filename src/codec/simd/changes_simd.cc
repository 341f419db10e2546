#include <bit>
#include <cstring>

#include "codec/simd/changes.h"
#include "codec/simd/kernel_set.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/simd/changes_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "codec/simd/simd_target.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::codec::HWY_NAMESPACE {
#if TESSERA_SIMD_TARGET
namespace hn = hwy::HWY_NAMESPACE;

// At most as many lanes as a word has bits, so that a word is one or more vectors.
template <typename T>
using D = hn::CappedTag<T, kAtomsPerWord>;

template <typename T>
HWY_INLINE uint64_t differing_lanes(const std::byte* now, const std::byte* before) {
  const D<T> d;
  const auto differs =
      hn::Ne(hn::LoadU(d, reinterpret_cast<const T*>(now)), hn::LoadU(d, reinterpret_cast<const T*>(before)));
  uint8_t bits[sizeof(uint64_t)] = {};
  hn::StoreMaskBits(d, differs, bits);
  return std::bit_cast<uint64_t>(bits);
}

template <typename T>
void find(const std::byte* now, const std::byte* before, size_t n, uint64_t* changed) {
  const size_t lanes = hn::Lanes(D<T>());
  const size_t whole = n - n % kAtomsPerWord;
  for (size_t first = 0; first < whole; first += kAtomsPerWord) {
    uint64_t word = 0;
    for (size_t i = 0; i < kAtomsPerWord; i += lanes)
      word |= differing_lanes<T>(now + (first + i) * sizeof(T), before + (first + i) * sizeof(T)) << i;
    changed[first / kAtomsPerWord] = word;
  }
  scalar_changes().find[std::countr_zero(sizeof(T))](now + whole * sizeof(T), before + whole * sizeof(T), n - whole,
                                                     changed + whole / kAtomsPerWord);
}

const ChangeKernels& change_kernels() {
  static const ChangeKernels kernels{.target = hwy::TargetName(HWY_TARGET),
                                     .find = {find<uint8_t>, find<uint16_t>, find<uint32_t>, find<uint64_t>}};
  return kernels;
}

#else
const ChangeKernels& change_kernels() {
  return scalar_changes();
}
#endif
}  // namespace tessera::codec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::codec {

HWY_EXPORT(change_kernels);
const ChangeKernels& simd_changes(int64_t target) {
  return TESSERA_CALL_TARGET(change_kernels, target);
}

}  // namespace tessera::codec
#endif
