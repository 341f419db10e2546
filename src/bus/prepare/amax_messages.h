// The messages between ranks of a sending job that quantises: Joins (once) and Amaxes (for each version), to rank 0,
// and Agreed, from it (amax_exchange.h, docs/formats/bus-protocol.md).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/message.h"
#include "bus/session/versions.h"
#include "peer/message.h"
#include "tessera/error.h"
#include "tessera/layout.h"

namespace tessera::bus {

inline constexpr uint32_t kMaxAmaxes = 1u << 22;  // of one rank

enum class AmaxMessage : uint16_t {
  kJoins = 37,
  kAmaxes,
  kAgreed,
};

// An amax that ranks of a sending job agree on: of a matrix, or of a block that a rank does not hold whole. Keys of
// several ranks are equal or they differ; nothing else matters here.
struct AmaxKey {
  static constexpr uint32_t kWhole = UINT32_MAX;  // instead of a block's row and column
  // Instead of a column, with kWhole for the row: the amax, or the only scale, of a matrix that is quantised already.
  // Ranks that hold some of it have this key, and must tell the same.
  static constexpr uint32_t kGivenAmax = UINT32_MAX - 1;
  static constexpr uint32_t kGivenScale = UINT32_MAX - 2;
  uint32_t group = 0;  // of tensors that are quantised as one
  uint32_t matrix = 0;
  uint32_t row = kWhole;
  uint32_t column = kWhole;
  bool given() const { return row == kWhole && column != kWhole; }
  auto operator<=>(const AmaxKey&) const = default;
};

// Keys travel as they are in memory: u32 group, u32 matrix, u32 row, u32 column.
static_assert(sizeof(AmaxKey) == 16 && std::is_trivially_copyable_v<AmaxKey>);

// A value that no format can represent: NaN or infinity.
struct NonfiniteFinding {
  static constexpr uint32_t kNone = UINT32_MAX;
  uint32_t tensor = kNone;  // position in the match
  uint64_t index = 0;       // row-major
  Rank rank = 0;            // that found it
  float value = 0;
  bool any() const { return tensor != kNone; }
  static void fields(auto& f, auto& self) {
    f("tensor", self.tensor);
    f("index", self.index);
    f("rank", self.rank);
    f("value", self.value);
  }
};

struct Joins {
  static constexpr auto kType = AmaxMessage::kJoins;
  std::vector<AmaxKey> keys;  // ascending
  static void fields(auto& f, auto& self) {
    f.array("keys", self.keys, kMaxAmaxes);
    const auto disorder = std::ranges::adjacent_find(self.keys, std::greater_equal<>{});
    f.require(disorder == self.keys.end(), "Joins: keys out of order at {}"_message, disorder - self.keys.begin());
  }
};

// Amaxes: what one rank has found in a version; Agreed: what all have. Amaxes are finite and not negative; there are
// none if there is an error.
template <AmaxMessage type>
struct AmaxValues {
  static constexpr auto kType = type;
  int64_t version = 0;
  uint32_t epoch = 0;              // counts the versions that the other rank has begun; 0: it will not begin this one
  Status status = {};              // not ok: why there are no amaxes
  NonfiniteFinding finding = {};   // likewise
  std::vector<float> amaxes = {};  // in the order of that rank's Joins
  static void fields(auto& f, auto& self) {
    constexpr std::string_view kName = kNameOf<type>;
    f("version", self.version);
    f("epoch", self.epoch);
    require_version(f, kName, self.version);
    heard_status_field(f, self.status);
    f("finding", self.finding);
    const NonfiniteFinding& found = self.finding;
    f.require(!found.any() || (found.rank >= 0 && !std::isfinite(found.value)), "{}: rank {} has found {}"_message,
              kName, found.rank, found.value);
    f.array("amaxes", self.amaxes, kMaxAmaxes);
    const auto bad = std::ranges::find_if_not(
        self.amaxes, [](float amax) { return std::isfinite(amax) && amax >= 0 && !std::signbit(amax); });
    if (bad != self.amaxes.end())
      f.require(false, "{}: an amax of {}: they are finite, and 0 or more"_message, kName, *bad);
    f.require(self.amaxes.empty() || (self.status.ok() && !found.any()),
              "{}: {} amaxes, and a reason for having none"_message, kName, self.amaxes.size());
  }
};
using Amaxes = AmaxValues<AmaxMessage::kAmaxes>;
using Agreed = AmaxValues<AmaxMessage::kAgreed>;

using AmaxMessages = MessageList<Joins, Amaxes, Agreed>;

}  // namespace tessera::bus
