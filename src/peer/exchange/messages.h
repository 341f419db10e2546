// How two ends of a connection tell each other where memory lies (docs/formats/bus-protocol.md). The side that pulls
// has said Attach (handshake.h):
//
//   puller                              source
//   ------                              ------
//                              Attached  arenas (with descriptors) and where each tensor lies
//   Prepare                              ring wanted? routes that ties make superfluous
//                              Prepared  with the ring's descriptor, if wanted
//
// A connection that moves no data is answered Prepared at once.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "peer/message.h"
#include "tessera/layout.h"
#include "transport/memory_desc.h"

namespace tessera {

inline constexpr uint32_t kMaxRoutes = 1u << 24;  // of one pair of ranks
inline constexpr uint32_t kMaxSlots = 8;          // versions that a sender keeps

enum class ExchangeMessage : uint16_t {
  kAttached = 5,
  kPrepare = 6,
  kPrepared = 7,
};

// Where the source's data lies, in the order of the routes between the two ranks: one entry a tensor, or one a route
// where the tensor is reduced first (docs/formats/bus-protocol.md).
struct Attached {
  static constexpr auto kType = ExchangeMessage::kAttached;
  struct Place {
    MemoryDesc memory;
    uint64_t origin = 0;         // of the first element, from the start of `memory`
    std::vector<Index> strides;  // bytes
    uint64_t slot_bytes = 0;     // slot s lies s times as far behind
    // Where the route's delta piece lies, if it may travel as one; slot s likewise.
    std::optional<MemoryDesc> delta = {};
    uint64_t delta_slot_bytes = 0;
  };
  uint32_t slots = 1;             // that Offer names; one where tensors are read in place
  std::vector<ArenaDesc> arenas;  // one descriptor each, with this frame
  bool more_arenas = false;       // another Attached follows; only the last one has places
  std::vector<Place> places;
  void write(ByteWriter& out) const;
  static Attached read(ByteReader& in);
};

struct Prepare {
  static constexpr auto kType = ExchangeMessage::kPrepare;
  bool ring = false;
  std::vector<uint32_t> skipped;  // positions in the routes of this connection, ascending
  void write(ByteWriter& out) const;
  static Prepare read(ByteReader& in);
};

struct Prepared {
  static constexpr auto kType = ExchangeMessage::kPrepared;
  void write(ByteWriter&) const {}
  static Prepared read(ByteReader&) { return {}; }
};

using ExchangeMessages = MessageList<Attached, Prepare, Prepared>;

}  // namespace tessera
