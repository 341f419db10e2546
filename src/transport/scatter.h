// Walks pieces on one side and buffers on the other in parallel.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "transport/connection.h"

namespace tessera {

// Calls move(offset, out) for every stretch that is contiguous on both sides, in order, until one fails. REQUIRES: both
// sides have the same total size.
template <typename Move>
Status scatter(std::span<const Piece> pieces, std::span<const std::span<std::byte>> out, Move move) {
  size_t filled = 0;  // bytes of out.front()
  for (Piece piece : pieces) {
    while (piece.bytes > 0) {
      while (filled == out.front().size()) {
        out = out.subspan(1);
        filled = 0;
      }
      const size_t bytes = std::min<size_t>(piece.bytes, out.front().size() - filled);
      if (Status status = move(piece.offset, out.front().subspan(filled, bytes)); !status.ok()) return status;
      filled += bytes;
      piece.offset += bytes;
      piece.bytes -= bytes;
    }
  }
  return {};
}

}  // namespace tessera
