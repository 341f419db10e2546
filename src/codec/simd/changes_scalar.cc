// The reference comparisons.
#include <cstring>

#include "codec/simd/changes.h"
#include "codec/simd/kernel_set.h"

namespace tessera::codec {
namespace {

template <size_t kBytes>
void find(const std::byte* now, const std::byte* before, size_t n, uint64_t* changed) {
  for (size_t i = 0; i < n; ++i) {
    uint64_t& word = changed[i / kAtomsPerWord];
    if (i % kAtomsPerWord == 0) word = 0;
    const bool differs = std::memcmp(now + i * kBytes, before + i * kBytes, kBytes) != 0;
    word |= uint64_t{differs} << (i % kAtomsPerWord);
  }
}

}  // namespace

const ChangeKernels& scalar_changes() {
  static const ChangeKernels kernels{.target = "scalar", .find = {find<1>, find<2>, find<4>, find<8>}};
  return kernels;
}

}  // namespace tessera::codec
