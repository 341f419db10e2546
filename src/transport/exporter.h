// What this process tells one peer of its memory. Keys are numbered as their regions are first named, and each is
// handed out once.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "transport/transport.h"

namespace tessera {

// One thread. `registry` must outlive it.
class Exporter {
 public:
  Exporter(const TransportRegistry& registry, Endpoint self, Endpoint peer)
      : registry_(registry), self_(std::move(self)), peer_(std::move(peer)) {}

  struct Exported {
    RemoteRange range;  // for the peer
    Caps caps;          // what it can do there
  };
  // By the transport that scores best from that memory to the peer. Throws Error(kUnimplemented) if none does, and what
  // Transport::export_region() throws.
  Exported add(const LocalMemory& memory);
  // Those of regions that have been named since the last call, in the order of their numbers.
  std::vector<RemoteKey> take_keys() { return std::exchange(keys_, {}); }

 private:
  const TransportRegistry& registry_;
  const Endpoint self_, peer_;
  std::map<std::pair<const Transport*, uint64_t>, uint32_t> numbers_;  // by Transport::Located::region
  std::vector<RemoteKey> keys_;                                        // not taken yet
};

}  // namespace tessera
