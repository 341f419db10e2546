// The receiver's side of a quantised route: from a wire piece into a local tensor of floats.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "exec/wire_piece.h"

namespace tessera {

// Immutable, hence thread-safe. What it reads may change under it: values are then wrong, and nothing else.
class WireDecoder {
 public:
  struct Target {
    LocalArray array;           // owns the piece's region
    DType dtype = DType::kF32;  // f64, f32, f16 or bf16; computed in f32, rounded once
    std::byte* data = nullptr;  // first element
  };
  // Throws Error(kInvalidArgument) for a target of another dtype or one that reaches beyond any memory.
  WireDecoder(std::shared_ptr<const WirePiece> piece, const std::byte* from, const Target& target);

  const WirePiece& piece() const { return *piece_; }
  int64_t band_bytes() const;   // of the larger side
  Index bands_at_once() const;  // so many that their codes fit the cache between digest() and decode()

  // WirePiece::digest() of what is read.
  void digest(Index first, Index last, Digest& main, Digest& rest) const {
    piece_->digest(from_, first, last, main, rest);
  }
  // Bands [first, last) into the target. Returns how many bytes of the piece that was; those that are no codes count
  // with the first band.
  int64_t decode(Index first, Index last) const;

 private:
  int64_t decode_matrix(Index matrix, const Interval& bands) const;

  std::shared_ptr<const WirePiece> piece_;
  const std::byte* from_;
  Target target_;
  BoxOffsets offsets_;
};

}  // namespace tessera
