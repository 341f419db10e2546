// The receiver's side of a quantised route: reads a wire piece. Into floats: exec/wire/wire_decode.h; into planes of a
// quantised tensor: exec/wire/plane_writer.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "exec/wire/wire_piece.h"

namespace tessera {

// Immutable, hence thread-safe. Each call gets the piece's bytes, mapped or fetched. They may change during the call:
// then values are wrong, but nothing worse happens.
class WireReader {
 public:
  virtual ~WireReader() = default;
  WireReader(const WireReader&) = delete;
  WireReader& operator=(const WireReader&) = delete;

  const WirePiece& piece() const { return *piece_; }
  virtual int64_t band_bytes() const = 0;  // of the larger side
  // Few enough that their codes stay in the cache between digest() and read().
  virtual Index bands_at_once() const {
    const int64_t bits = piece_->walk().band_elements() * bits_of(piece_->what().format.codes);
    return std::max<Index>(8 * kCachedCodes / std::max<int64_t>(bits, 1), 1);
  }

  // Reads bands [first, last) of the piece at `from` into the target. Returns the number of bytes of the piece that
  // were read; those that are not codes count with the first band.
  int64_t read(const std::byte* from, Index first, Index last) const {
    int64_t bytes = first == 0 ? piece_->code_section() : 0;
    piece_->walk().for_each_matrix(
        first, last, [&](Index matrix, const Interval& bands) { bytes += read_matrix(from, matrix, bands); });
    return bytes;
  }

 protected:
  explicit WireReader(std::shared_ptr<const WirePiece> piece) : piece_(std::move(piece)) {}

  static constexpr int64_t kCachedCodes = int64_t{64} << 10;

  // Some bands of one matrix; returns the bytes of their codes.
  virtual int64_t read_matrix(const std::byte* from, Index matrix, const Interval& bands) const = 0;
  // Calls visit(box) for its boxes; returns the bytes of their codes.
  template <typename Visit>
  int64_t for_each_box(Index matrix, const Interval& bands, const Visit& visit) const {
    int64_t bytes = 0;
    const Index first = matrix * piece_->walk().bands();
    piece_->walk().for_each_box(first + bands.begin, first + bands.end, [&](const BlockBox& box) {
      visit(box);
      bytes += box.rows.size() * piece_->box_row_bytes(box);
    });
    return bytes;
  }

 private:
  const std::shared_ptr<const WirePiece> piece_;
};

}  // namespace tessera
