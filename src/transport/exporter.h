// Announces this process's memory to one peer. Keys are numbered in the order in which their regions are first added,
// and each is handed out once.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "transport/transport.h"

namespace tessera {

// Used by one thread. `registry` must outlive it.
class Exporter {
 public:
  Exporter(const TransportRegistry& registry, Endpoint self, Endpoint peer)
      : registry_(registry), self_(std::move(self)), peer_(std::move(peer)) {}

  struct Exported {
    RemoteRange range;  // as the peer refers to it
    Caps caps;          // the peer's ways of access
  };
  // Exports memory by the transport that scores best between it and the peer. Throws Error(kUnimplemented) if there is
  // none, and the errors of Transport::export_region().
  Exported add(const LocalMemory& memory);
  // The keys of regions that were added since the last call, in the order of their numbers.
  std::vector<RemoteKey> take_keys() { return std::exchange(keys_, {}); }

 private:
  const TransportRegistry& registry_;
  const Endpoint self_, peer_;
  std::map<std::pair<const Transport*, uint64_t>, uint32_t> numbers_;  // by Transport::Located::region
  std::vector<RemoteKey> keys_;                                        // not taken yet
};

}  // namespace tessera
