// The receiver's side of a quantised route: what reads a wire piece. Into floats: exec/wire/wire_decode.h; into planes
// of a quantised tensor: exec/wire/plane_writer.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "exec/wire/wire_piece.h"

namespace tessera {

// Immutable, hence thread-safe. It is given the piece's bytes with each call, mapped or fetched; they may change under
// it: values are then wrong, and nothing else.
class WireReader {
 public:
  virtual ~WireReader() = default;
  WireReader(const WireReader&) = delete;
  WireReader& operator=(const WireReader&) = delete;

  const WirePiece& piece() const { return *piece_; }
  virtual int64_t band_bytes() const = 0;  // of the larger side
  // So many that their codes fit the cache between digest() and read().
  virtual Index bands_at_once() const {
    const int64_t bits = piece_->walk().band_elements() * bits_of(piece_->what().format.codes);
    return std::max<Index>(8 * kCachedCodes / std::max<int64_t>(bits, 1), 1);
  }

  // Bands [first, last) of the piece at `from` into the target. Returns how many bytes of the piece that was; those
  // that are no codes count with the first band.
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
