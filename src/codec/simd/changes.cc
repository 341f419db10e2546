#include "codec/simd/changes.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/fail.h"
#include "codec/simd/kernel_set.h"

namespace tessera {
namespace {

// Calls use() with the size of an atom as a std::integral_constant.
template <typename Use>
auto with_size(size_t atom_bytes, const Use& use) {
  switch (atom_bytes) {
    case 1:
      return use(std::integral_constant<size_t, 1>());
    case 2:
      return use(std::integral_constant<size_t, 2>());
    case 4:
      return use(std::integral_constant<size_t, 4>());
    case 8:
      return use(std::integral_constant<size_t, 8>());
    default:
      TESSERA_CHECK(false);
  }
}

template <size_t kBytes>
std::byte* pack(const std::byte* now, std::byte* before, size_t n, const uint64_t* changed, std::byte* values) {
  for (size_t first = 0; first < n; first += kAtomsPerWord) {
    uint64_t word = changed[first / kAtomsPerWord];
    if (word == 0) continue;
    const std::byte* const atoms = now + first * kBytes;
    const size_t bytes = std::min(kAtomsPerWord, n - first) * kBytes;
    if (word == ~uint64_t{0}) {
      std::memcpy(values, atoms, bytes);
      values += bytes;
    } else {
      for (; word != 0; word &= word - 1, values += kBytes)
        std::memcpy(values, atoms + static_cast<size_t>(std::countr_zero(word)) * kBytes, kBytes);
    }
    std::memcpy(before + first * kBytes, atoms, bytes);
  }
  return values;
}

template <size_t kBytes>
const std::byte* unpack(const uint64_t* changed, size_t first, size_t n, const std::byte* values, std::byte* dst,
                        ptrdiff_t step) {
  for (size_t done = 0; done < n;) {
    const size_t skipped = (first + done) % kAtomsPerWord;
    const size_t count = std::min(kAtomsPerWord - skipped, n - done);
    uint64_t word = changed[(first + done) / kAtomsPerWord] >> skipped;
    if (count < kAtomsPerWord) word &= (uint64_t{1} << count) - 1;
    for (; word != 0; word &= word - 1, values += kBytes)
      std::memcpy(dst + static_cast<ptrdiff_t>(done + static_cast<size_t>(std::countr_zero(word))) * step, values,
                  kBytes);
    done += count;
  }
  return values;
}

}  // namespace

size_t find_changes(size_t atom_bytes, const std::byte* now, const std::byte* before, size_t n, uint64_t* changed) {
  TESSERA_CHECK(std::has_single_bit(atom_bytes) && atom_bytes <= 8);
  codec::active_kernels().changes->find[std::countr_zero(atom_bytes)](now, before, n, changed);
  size_t count = 0;
  for (size_t w = 0; w * kAtomsPerWord < n; ++w) count += static_cast<size_t>(std::popcount(changed[w]));
  return count;
}

std::byte* pack_changes(size_t atom_bytes, const std::byte* now, std::byte* before, size_t n, const uint64_t* changed,
                        std::byte* values) {
  return with_size(atom_bytes, [&](auto size) { return pack<size()>(now, before, n, changed, values); });
}

const std::byte* unpack_changes(size_t atom_bytes, const uint64_t* changed, size_t first, size_t n,
                                const std::byte* values, std::byte* dst, ptrdiff_t step) {
  return with_size(atom_bytes, [&](auto size) { return unpack<size()>(changed, first, n, values, dst, step); });
}

}  // namespace tessera
