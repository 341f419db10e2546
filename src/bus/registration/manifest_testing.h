// Entries of manifests for tests.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bus/registration/manifest.h"

namespace tessera::bus {

inline ManifestEntry entry(const std::string& name, const Shape& shape, const std::string& layout,
                           DType dtype = DType::kF32) {
  return {.name = name, .dtype = dtype, .shape = shape, .layout = Layout::parse(layout).bind(shape)};
}

inline std::vector<std::string> names(const Manifest& manifest) {
  std::vector<std::string> all;
  for (const ManifestEntry& one : manifest.entries) all.push_back(one.name);
  return all;
}

inline ManifestEntry quantised(ManifestEntry entry, std::optional<Format> wire) {
  entry.wire = wire;
  return entry;
}

}  // namespace tessera::bus
