// Which atoms of a run of memory differ from what it held before, by bits: -0.0 is not 0.0, and a NaN with the same
// payload is the same. An atom is 1, 2, 4 or 8 bytes; memory may be unaligned.
//
// Functions never throw and allocate nothing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera {

inline constexpr size_t kAtomsPerWord = 64;

// Sets bit i % 64 of changed[i / 64] if atom i of `now` is not that of `before`, for i < n; the bits behind them in the
// last word are 0. Returns how many are set.
size_t find_changes(size_t atom_bytes, const std::byte* now, const std::byte* before, size_t n, uint64_t* changed);

// Packs the atoms of `now` whose bits are set to `values`, and makes `before` hold what `now` does. Returns the end of
// what was packed.
std::byte* pack_changes(size_t atom_bytes, const std::byte* now, std::byte* before, size_t n, const uint64_t* changed,
                        std::byte* values);

// Stores the atoms packed at `values` where bits are set among the `n` from bit `first` of `changed` on: that of bit
// first + i at dst + i * step. Returns the end of what was taken.
const std::byte* unpack_changes(size_t atom_bytes, const uint64_t* changed, size_t first, size_t n,
                                const std::byte* values, std::byte* dst, ptrdiff_t step);

}  // namespace tessera
