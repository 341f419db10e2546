#include "exec/wire_decode.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/fail.h"

namespace tessera {
namespace {

constexpr int64_t kCachedCodes = int64_t{64} << 10;

}  // namespace

WireDecoder::WireDecoder(std::shared_ptr<const WirePiece> piece, const std::byte* from, const Target& target)
    : piece_(std::move(piece)),
      from_(from),
      target_(target),
      offsets_(piece_->what(), target.array.owned, target.array.strides) {
  if (!is_castable_float(target_.dtype))
    fail(ErrorCode::kInvalidArgument, "a tensor that travels as {} is decoded into f64, f32, f16 or bf16, not {}",
         to_string(piece_->what().format.spec.format), to_string(target_.dtype));
  extent_of(target_.dtype, target_.array.owned.extents(), target_.array.strides);
}

int64_t WireDecoder::band_bytes() const {
  return std::max<int64_t>(bytes_of(target_.dtype, piece_->walk().band_elements()), 1);
}

Index WireDecoder::bands_at_once() const {
  const int64_t bits = piece_->walk().band_elements() * bits_of(piece_->what().format.codes);
  return std::max<Index>(8 * kCachedCodes / std::max<int64_t>(bits, 1), 1);
}

int64_t WireDecoder::decode(Index first, Index last) const {
  int64_t bytes = first == 0 ? piece_->code_section() : 0;
  piece_->walk().for_each_matrix(first, last,
                                 [&](Index matrix, const Interval& bands) { bytes += decode_matrix(matrix, bands); });
  return bytes;
}

int64_t WireDecoder::decode_matrix(Index matrix, const Interval& bands) const {
  const codec::BlockFormat& format = piece_->what().format;
  float amax = 0;
  if (needs_amax(format.spec.format)) std::memcpy(&amax, from_ + piece_->amax(matrix), sizeof(amax));
  const codec::BlockDecoder decoder(format, amax);
  const Index first = matrix * piece_->walk().bands();
  int64_t bytes = 0;
  piece_->walk().for_each_box(first + bands.begin, first + bands.end, [&](const BlockBox& box) {
    decoder.decode({from_ + piece_->codes(box), piece_->row_bytes(), piece_->odd(box)},
                   {from_ + piece_->scale(matrix, box.block_row, box.block_column), piece_->scale_row_bytes()},
                   matrix_box(piece_->what(), box, offsets_, target_.data, target_.dtype));
    bytes += box.rows.size() * piece_->box_row_bytes(box);
  });
  return bytes;
}

}  // namespace tessera
