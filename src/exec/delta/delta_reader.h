// The receiver's side of a delta: writes the changed atoms of a route straight to their places in a local tensor, which
// must hold the sender's base.
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

// Immutable, hence thread-safe. The caller passes the bytes of each segment, mapped or fetched. They may change during
// the call: then values are wrong, but nothing worse happens.
class DeltaReader {
 public:
  // Throws Error(kInvalidArgument) for a cast that does not exist.
  explicit DeltaReader(const PullRoute& route);

  const DeltaPiece& piece() const { return piece_; }
  int64_t elements_per_atom() const { return elements_per_atom_; }
  // Whether the destination has the source's bits. If not, only the piece can be compared with what was sent.
  bool copies() const { return cast_ == nullptr; }

  // Stores the changes of a segment; adds what it reads to `of_piece` unless that is null (DeltaRun::digests()). Needs
  // kScratchBytes. Never leaves a segment's room for words and values, whatever it reads.
  static constexpr size_t kScratchBytes = size_t{64} << 10;
  void apply(int64_t segment, const DeltaSegment& from, std::span<std::byte> scratch, Digest* of_piece) const;
  // Adds the destination's part of a segment to the route's digest. REQUIRES: copies()
  void digest(int64_t segment, Digest& digest) const;

 private:
  using ChunkBitmap = std::array<uint64_t, DeltaPiece::kChunkAtoms / DeltaPiece::kWordAtoms>;

  static size_t expand(uint64_t summary, int64_t atoms, const std::byte*& words, ChunkBitmap& bitmap);
  void store(int64_t first, int64_t atoms, const uint64_t* words, const std::byte* values) const;

  DeltaPiece piece_;
  int64_t elements_per_atom_;
  int64_t dst_bytes_;       // bytes of an atom
  CastRow cast_ = nullptr;  // null: bits are copied unchanged
  Walk walk_;               // over the destination, and the image
  std::byte* data_;
};

}  // namespace tessera
