// How two ends of a connection tell each other where memory lies (docs/formats/bus-protocol.md). It follows the Attach
// (handshake.h) of the side that pulls:
//
//   puller                              source
//   ------                              ------
//                              Attached  keys (with descriptors) and where each tensor lies
//   Prepare                              whether it wants a stream; routes that tied tensors make superfluous
//                              Prepared  with one end of the stream, if it wants one
//
// On a connection that moves no data the answer to Attach is Prepared.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "base/message.h"
#include "peer/message.h"
#include "tessera/layout.h"
#include "transport/remote_key.h"

namespace tessera {

inline constexpr uint32_t kMaxRoutes = 1u << 24;  // of one pair of ranks
inline constexpr uint32_t kMaxSlots = 8;
inline constexpr uint32_t kMaxKeys = 1 << 14;  // of one connection

enum class ExchangeMessage : uint16_t {
  kAttached = 5,
  kPrepare = 6,
  kPrepared = 7,
};

// Where the source's data lies, in the order of the routes between the two ranks: one entry for each tensor, or for
// each route if it is reduced, quantised or may travel as a delta (docs/formats/bus-protocol.md).
struct Attached {
  static constexpr auto kType = ExchangeMessage::kAttached;
  struct Place {
    RemoteRange memory{};
    uint64_t origin = 0;           // of the first element, from the start of `memory`
    std::vector<Index> strides{};  // bytes
    uint64_t slot_bytes = 0;       // slot s begins s * slot_bytes after slot 0
    // Where the route's delta piece lies, if it may travel as one; slots as above, with delta_slot_bytes.
    std::optional<RemoteRange> delta = {};
    uint64_t delta_slot_bytes = 0;
    static void fields(auto& f, auto& self) {
      f("memory", self.memory);
      f("origin", self.origin);
      short_list_field(f, "strides", self.strides, [&](uint8_t dims) {
        f.require(dims <= kMaxDims, "Attached: a tensor of {} dims"_message, dims);
      });
      f("slot_bytes", self.slot_bytes);
      f("delta", self.delta);
      if (self.delta) f("delta_slot_bytes", self.delta_slot_bytes);
    }
  };
  uint32_t slots = 1;             // copies of everything, one after another
  std::vector<RemoteKey> keys{};  // numbered after earlier messages' keys; the descriptors come with this frame
  bool more_keys = false;         // another Attached follows; only the last one has places
  std::vector<Place> places{};
  static void fields(auto& f, auto& self) {
    f("slots", self.slots);
    f.require(self.slots >= 1 && self.slots <= kMaxSlots, "Attached: {} slots"_message, self.slots);
    f("keys", self.keys, kMaxKeys);
    f("more_keys", self.more_keys);
    f("places", self.places, kMaxRoutes);
  }
};

struct Prepare {
  static constexpr auto kType = ExchangeMessage::kPrepare;
  bool stream = false;
  std::vector<uint32_t> skipped;  // positions in the routes of this connection, ascending
  static void fields(auto& f, auto& self) {
    f("stream", self.stream);
    f("skipped", self.skipped, kMaxRoutes);
    const auto disorder = std::ranges::adjacent_find(self.skipped, std::greater_equal<>{});
    if (disorder != self.skipped.end())
      f.require(false, "Prepare: skipped routes out of order at {}"_message, *std::next(disorder));
  }
};

struct Prepared {
  static constexpr auto kType = ExchangeMessage::kPrepared;
  std::string transport{};  // of the stream; this frame carries one end of it. Empty: none was wanted
  static void fields(auto& f, auto& self) { f("transport", self.transport, RemoteKey::kMaxNameBytes); }
};

using ExchangeMessages = MessageList<Attached, Prepare, Prepared>;

}  // namespace tessera
