// Finds the atoms in a run of memory whose bits have changed: -0.0 differs from 0.0, and a NaN equals one with the same
// payload. An atom has 1, 2, 4 or 8 bytes; memory may be unaligned.
//
// Functions never throw and allocate nothing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera {

inline constexpr size_t kAtomsPerWord = 64;

// Sets bit i % 64 of changed[i / 64] if atom i of `now` differs from that of `before`, for i < n. The remaining bits of
// the last word are 0. Returns the number of bits that are set.
size_t find_changes(size_t atom_bytes, const std::byte* now, const std::byte* before, size_t n, uint64_t* changed);

// Packs the atoms of `now` whose bits are set into `values`, and copies them to `before`, which then equals `now`.
// Returns the end of the packed atoms.
std::byte* pack_changes(size_t atom_bytes, const std::byte* now, std::byte* before, size_t n, const uint64_t* changed,
                        std::byte* values);

// Unpacks `values` according to the `n` bits from bit `first` of `changed` on: if bit first + i is set, the next atom
// of `values` goes to dst + i * step. Returns the end of the atoms that were used.
const std::byte* unpack_changes(size_t atom_bytes, const uint64_t* changed, size_t first, size_t n,
                                const std::byte* values, std::byte* dst, ptrdiff_t step);

}  // namespace tessera
