// What ranks of a sending job that quantises say to each other: Joins, once, Amaxes (of a version), to rank 0, and
// Agreed, from it (amax_exchange.h, docs/formats/bus-protocol.md).
#pragma once

#include <cstdint>
#include <vector>

#include "peer/message.h"
#include "tessera/error.h"
#include "tessera/layout.h"

namespace tessera::bus {

inline constexpr uint32_t kMaxAmaxes = 1u << 22;  // that one rank joins

enum class AmaxMessage : uint16_t {
  kJoins = 37,
  kAmaxes,
  kAgreed,
};

// An amax that ranks of a sending job agree on: of a matrix, or of a block of it that a rank does not hold whole. Keys
// of several ranks meet or they do not; nothing else is known of them here.
struct AmaxKey {
  static constexpr uint32_t kWhole = UINT32_MAX;  // in place of a block's row and column
  uint32_t group = 0;                             // of tensors that are quantised as one
  uint32_t matrix = 0;
  uint32_t row = kWhole;
  uint32_t column = kWhole;
  auto operator<=>(const AmaxKey&) const = default;
};

// A value that no format takes: NaN or infinity.
struct NonfiniteFinding {
  static constexpr uint32_t kNone = UINT32_MAX;
  uint32_t tensor = kNone;  // ordinal in the match
  uint64_t index = 0;       // row-major
  Rank rank = 0;            // that found it
  float value = 0;
  bool any() const { return tensor != kNone; }
};

struct Joins {
  static constexpr auto kType = AmaxMessage::kJoins;
  std::vector<AmaxKey> keys;  // ascending
  void write(ByteWriter& out) const;
  static Joins read(ByteReader& in);
};

// Amaxes: what one rank has of a version; Agreed: what all have.
template <AmaxMessage type>
struct AmaxValues {
  static constexpr auto kType = type;
  int64_t version = 0;
  uint32_t epoch = 0;              // counts what the rank that is not rank 0 has begun, or 0: it will not begin it
  Status status = {};              // not ok: why there are none
  NonfiniteFinding finding = {};   // likewise
  std::vector<float> amaxes = {};  // in the order of that rank's Joins
  void write(ByteWriter& out) const;
  // Amaxes are finite and not negative; there are none where there is a reason for that.
  static AmaxValues read(ByteReader& in, std::vector<float> room = {});
};
using Amaxes = AmaxValues<AmaxMessage::kAmaxes>;
using Agreed = AmaxValues<AmaxMessage::kAgreed>;

using AmaxMessages = MessageList<Joins, Amaxes, Agreed>;

}  // namespace tessera::bus
