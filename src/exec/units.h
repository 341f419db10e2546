// Cuts the routes of a program into units of work of about equal size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

// Atoms [first_atom, last_atom) of the sequence that starts in part `first` and ends in part `last`; the parts in
// between are whole.
struct Unit {
  uint32_t first_part = 0;
  uint32_t last_part = 0;  // inclusive
  int64_t first_atom = 0;  // within first_part
  int64_t last_atom = 0;   // within last_part
};

// The properties of a part that cutting needs.
struct PartSize {
  int64_t atoms = 0;
  int64_t atom_bytes = 1;
  int64_t row_atoms = 1;  // cuts prefer multiples of this
};

inline constexpr int64_t kUnitBytes = int64_t{2} << 20;

// Units of about `unit_bytes` that together cover all parts in order. Empty parts may be skipped.
std::vector<Unit> cut_into_units(std::span<const PartSize> parts, int64_t unit_bytes = kUnitBytes);

// Calls visit(part, first_atom, last_atom) for every part of a unit.
template <typename Parts, typename Visit>
void for_each_part(const Unit& unit, const Parts& atoms_of, Visit visit) {
  for (uint32_t part = unit.first_part; part <= unit.last_part; ++part) {
    const int64_t first = part == unit.first_part ? unit.first_atom : 0;
    const int64_t last = part == unit.last_part ? unit.last_atom : atoms_of(part);
    visit(part, first, last);
  }
}

}  // namespace tessera
