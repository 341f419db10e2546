// Planes of quantised tensors, as Python names them.
#pragma once

#include <string>
#include <vector>

#include "choice.h"
#include "tessera/quantize.h"

namespace tessera::python {

inline Plane plane_from(const std::string& name) {
  static constexpr Choice<Plane> kPlanes[] = {{"row", Plane::kRow}, {"column", Plane::kColumn}};
  return chosen("plane", name, kPlanes);
}

inline PlaneSet plane_set(const std::vector<std::string>& names) {
  PlaneSet planes;
  for (const std::string& name : names) (plane_from(name) == Plane::kRow ? planes.row : planes.column) = true;
  return planes;
}

inline std::vector<std::string> names_of(PlaneSet planes) {
  std::vector<std::string> names;
  if (planes.row) names.emplace_back(to_string(Plane::kRow));
  if (planes.column) names.emplace_back(to_string(Plane::kColumn));
  return names;
}

}  // namespace tessera::python
