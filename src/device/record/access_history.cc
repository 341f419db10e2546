#include "device/record/access_history.h"

#include <algorithm>
#include <utility>

namespace tessera::device {

AccessHistory::Id AccessHistory::add(const RecordedAccess& access, OrderPoint point, VectorClock clock) {
  const auto id = static_cast<Id>(nodes_.size());
  const uint64_t end = access.offset + access.bytes;
  nodes_.push_back({.begin = access.offset,
                    .end = end,
                    .point = point,
                    .links = static_cast<uint32_t>(links_.size()),
                    .write = access.write});
  Pieces& pieces = regions_[access.region];
  const auto first = cut(pieces, access.offset);
  cut(pieces, end);
  uint64_t covered = access.offset;
  for (auto piece = first; covered < end; ++piece) {
    if (piece == pieces.end() || piece->first > covered) {
      const uint64_t gap_end = piece == pieces.end() ? end : std::min(end, piece->first);
      piece = pieces.emplace_hint(piece, covered, Piece{gap_end, {}});
    }
    visit_piece(piece->second, id, clock);
    covered = piece->second.end;
  }
  const auto links = links_.begin() + nodes_[id].links;
  std::sort(links, links_.end());
  links_.erase(std::unique(links, links_.end()), links_.end());
  nodes_[id].link_count = static_cast<uint32_t>(links_.size()) - nodes_[id].links;
  join_alike(pieces, pieces.find(access.offset), end);
  return id;
}

// Makes `at` a border between pieces; the first piece that ends after it.
AccessHistory::Pieces::iterator AccessHistory::cut(Pieces& pieces, uint64_t at) {
  const auto next = pieces.lower_bound(at);
  if (next == pieces.begin()) return next;
  const auto piece = std::prev(next);
  if (piece->second.end <= at) return next;
  Piece rest{piece->second.end, piece->second.last};
  piece->second.end = at;
  return pieces.emplace_hint(next, at, std::move(rest));
}

// The pieces of [from, end) leave no gaps.
void AccessHistory::join_alike(Pieces& pieces, Pieces::iterator from, uint64_t end) {
  for (auto next = std::next(from); next != pieces.end() && next->first < end;) {
    if (next->second.last == from->second.last) {
      from->second.end = next->second.end;
      next = pieces.erase(next);
    } else {
      from = next++;
    }
  }
}

void AccessHistory::visit_piece(Piece& piece, Id id, VectorClock clock) {
  const bool write = nodes_[id].write;
  auto kept = piece.last.begin();
  for (const Id earlier : piece.last) {
    const Node& node = nodes_[earlier];
    const bool ordered = node.point.before(clock);
    if (!ordered && (write || node.write) && comparing_) compare(earlier, id, clock);
    if (ordered && (write || !node.write))
      links_.push_back(earlier);
    else
      *kept++ = earlier;
  }
  piece.last.erase(kept, piece.last.end());
  piece.last.push_back(id);
}

void AccessHistory::compare(Id earlier, Id later, VectorClock clock) {
  const Node& mine = nodes_[later];
  const auto look_at = [&](Id id) {
    Node& node = nodes_[id];
    if (std::exchange(node.seen_by, later) == later || node.point.before(clock)) return;
    // What leads to an access of a byte has that byte, too.
    if ((mine.write || node.write) && node.begin < mine.end && mine.begin < node.end) stack_.push_back(id);
  };
  stack_.clear();
  look_at(earlier);
  while (!stack_.empty()) {
    const Id id = stack_.back();
    stack_.pop_back();
    if (!found_(id, later)) {
      comparing_ = false;
      return;
    }
    const Node& node = nodes_[id];
    for (uint32_t i = 0; i < node.link_count; ++i) look_at(links_[node.links + i]);
  }
}

}  // namespace tessera::device
