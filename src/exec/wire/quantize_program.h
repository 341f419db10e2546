// The parts of a QuantizeProgram. For quantize_*.cc only.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "exec/wire/quantize_run.h"

namespace tessera {

struct QuantizePart {
  uint32_t tensor = 0;
  WirePiece piece;
  codec::BlockEncoder encoder;
  BoxOffsets send;  // boxes of the piece in the source
  // Also what is around the region in the same blocks. Touches the same blocks as the piece.
  WireRegion seen;
  BlockWalk look;
  BoxOffsets look_at;
  // Places of cut blocks in the grid's dims.
  std::vector<Index> cut_rows, cut_columns;
  std::optional<PlaneReader> planes;

  explicit QuantizePart(const QuantizeRoute& route);
  const codec::BlockFormat& format() const { return piece.what().format; }
  int64_t looked_at() const { return bytes_of(seen.src_dtype, look.elements()); }
  size_t grid_place(Index matrix, Index block_row, Index block_column) const {
    const BlockWalk& walk = piece.walk();
    return static_cast<size_t>((matrix * walk.block_rows().size() + block_row) * walk.block_columns().size() +
                               block_column);
  }
};

struct QuantizeProgram::Impl {
  std::vector<QuantizePart> parts;
  std::vector<Unit> amax_units, encode_units;  // of bands
  int64_t encode_bytes = 0;
};

}  // namespace tessera
