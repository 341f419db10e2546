// For the *_simd.cc files, which Highway compiles once per target: which targets get kernels, and how to call them.
#pragma once

#include <hwy/highway.h>

#include <cstdint>

// Highway's tables contain HWY_SCALAR or HWY_EMU128 if the compiler's baseline is no better. The *_scalar.cc files
// replace these two. (Expanded once for each target, like HWY_TARGET.)
#define TESSERA_SIMD_TARGET (HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128)

// Whether there are instructions for f16 <-> f32. On x86 the better target has the lower bit.
#if HWY_ARCH_X86 && !defined(HWY_DISABLE_F16C)
#define TESSERA_F16_INSTRUCTIONS (HWY_TARGET <= HWY_AVX2)
#else
#define TESSERA_F16_INSTRUCTIONS HWY_ARCH_ARM_A64
#endif

// Calls the version that HWY_EXPORT(function) holds for one target. (HWY_DYNAMIC_DISPATCH knows only the best target.)
#if (HWY_TARGETS & (HWY_TARGETS - 1)) == 0
#define TESSERA_CALL_TARGET(function, target) (static_cast<void>(target), HWY_STATIC_DISPATCH(function)())
#else
#define TESSERA_CALL_TARGET(function, target) (HWY_DISPATCH_TABLE(function)[::tessera::codec::table_index(target)]())
#endif

namespace tessera::codec {

inline size_t table_index(int64_t target) {
  hwy::ChosenTarget chosen;
  chosen.Update(target);
  return chosen.GetIndex();
}

}  // namespace tessera::codec
