// The receiver's side of a delta: the changed atoms of a route straight to their places in a local tensor, which holds
// what the sender's base held before.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "codec/simd/cast.h"
#include "codec/simd/digest.h"
#include "exec/delta/delta_piece.h"
#include "exec/walk/walk.h"

namespace tessera {

// Immutable, hence thread-safe. It is given the bytes of each segment, mapped or fetched; they may change under it:
// values are then wrong, and nothing else.
class DeltaReader {
 public:
  // Throws Error(kInvalidArgument) for a cast that does not exist.
  explicit DeltaReader(const PullRoute& route);

  const DeltaPiece& piece() const { return piece_; }
  int64_t elements_per_atom() const { return elements_per_atom_; }
  // Whether the destination has the source's bits. If not, only the piece can be compared with what was sent.
  bool copies() const { return cast_ == nullptr; }

  // Stores what has changed in a segment; if `of_piece` is not null, adds what it reads (DeltaRun::digests()). Needs
  // kScratchBytes. Whatever it reads, it stays within a segment's room for words and values.
  static constexpr size_t kScratchBytes = size_t{64} << 10;
  void apply(int64_t segment, const DeltaSegment& from, std::span<std::byte> scratch, Digest* of_piece) const;
  // Adds what the destination holds of a segment to the route's digest. REQUIRES: copies()
  void digest(int64_t segment, Digest& digest) const;

 private:
  using ChunkBitmap = std::array<uint64_t, DeltaPiece::kChunkAtoms / DeltaPiece::kWordAtoms>;

  static size_t expand(uint64_t summary, int64_t atoms, const std::byte*& words, ChunkBitmap& bitmap);
  void store(int64_t first, int64_t atoms, const uint64_t* words, const std::byte* values) const;

  DeltaPiece piece_;
  int64_t elements_per_atom_;
  int64_t dst_bytes_;       // of an atom
  CastRow cast_ = nullptr;  // null: bits move untouched
  Walk walk_;               // over the destination, and the image
  std::byte* data_;
};

}  // namespace tessera
