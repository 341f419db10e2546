#include "exec/units.h"

#include <algorithm>

namespace tessera {

std::vector<Unit> cut_into_units(std::span<const PartSize> parts, int64_t unit_bytes) {
  std::vector<Unit> units;
  Unit unit;
  int64_t filled = 0;
  bool open = false;
  for (uint32_t p = 0; p < parts.size(); ++p) {
    const PartSize& part = parts[p];
    for (int64_t atom = 0; atom < part.atoms;) {
      if (!open) unit = {.first_part = p, .last_part = p, .first_atom = atom, .last_atom = atom};
      open = true;
      int64_t take = std::max<int64_t>((unit_bytes - filled) / part.atom_bytes, 1);
      if (take > part.row_atoms) take -= take % part.row_atoms;
      take = std::min(take, part.atoms - atom);
      atom += take;
      filled += take * part.atom_bytes;
      unit.last_part = p;
      unit.last_atom = atom;
      const bool row_left_over = atom < part.atoms;
      if (filled < unit_bytes && !row_left_over) continue;
      units.push_back(unit);
      open = false;
      filled = 0;
    }
  }
  if (open) units.push_back(unit);
  return units;
}

}  // namespace tessera
