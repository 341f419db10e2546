// Suggests a map of names for two jobs whose frameworks have wrapped one model differently. Pure.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "bus/registration/manifest.h"

namespace tessera::bus {

// One side of a batch, as its manifest has it.
struct NamedSide {
  const Manifest& manifest;
  std::string_view job;
};

// Returns the map= that lets the receiver's entries that are not `filled` find an offer, in words: "3 of the 4 names
// match if engine registers with map={...}". A map that would take an offer from an entry that has one, or join tensors
// of different shapes, is not suggested; empty if there is none that helps a third of them, or two that help equally.
// Takes time proportional to the names' total length.
std::string suggest_map(const NamedSide& sender, const NamedSide& receiver, const std::vector<bool>& filled);

}  // namespace tessera::bus
