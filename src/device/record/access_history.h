// Who accessed which bytes last, so that each further access can be compared with all earlier ones that nothing orders.
//
// Memory is cut into pieces that were accessed alike. A piece keeps the accesses that a later one may be unordered
// with: its last reads and writes. An access that happens before a later one drops out if the later one writes, or if
// both read: what is unordered with the first is then unordered with the second as well, and conflicts with it too. The
// second keeps a link to what it displaced, so that a conflict leads to all others, and a schedule without any costs no
// more than looking at the last ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "device/record/order.h"
#include "device/record/record.h"

namespace tessera::device {

// Thread-compatible.
class AccessHistory {
 public:
  using Id = uint32_t;  // of an access: 0, 1, 2, ...

  // Called with every earlier access to some of the same bytes that does not happen before this one, one of the two
  // being a write. Returns whether to look further: after a false nothing is compared any more.
  using Found = std::function<bool(Id earlier, Id later)>;
  explicit AccessHistory(Found found) : found_(std::move(found)) {}

  // Accesses come in an order that agrees with their clocks, those of a record one after another. `clock` includes the
  // point. Bytes must not be 0.
  Id add(const RecordedAccess& access, OrderPoint point, VectorClock clock);

 private:
  // An access; what it displaced is in links_.
  struct Node {
    uint64_t begin, end;
    OrderPoint point;
    uint32_t links = 0;
    uint32_t link_count = 0;
    uint32_t seen_by = 0;  // the last access compared with it
    bool write = false;
  };
  // Up to its end, from its key in the map. By the order of add().
  struct Piece {
    uint64_t end;
    std::vector<Id> last;
  };
  using Pieces = std::map<uint64_t, Piece>;
  struct RegionHash {
    size_t operator()(const RegionId& id) const {
      return std::hash<uint64_t>{}(id.number * 0x9E3779B97F4A7C15 + static_cast<uint64_t>(id.owner));
    }
  };

  static Pieces::iterator cut(Pieces& pieces, uint64_t at);
  static void join_alike(Pieces& pieces, Pieces::iterator from, uint64_t end);
  void visit_piece(Piece& piece, Id id, VectorClock clock);
  void compare(Id earlier, Id later, VectorClock clock);

  const Found found_;
  bool comparing_ = true;
  std::unordered_map<RegionId, Pieces, RegionHash> regions_;
  std::vector<Node> nodes_;
  std::vector<Id> links_;
  std::vector<Id> stack_;
};

}  // namespace tessera::device
