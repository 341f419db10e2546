#include "exec/wire/wire_decode.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/fail.h"

namespace tessera {

WireDecoder::WireDecoder(std::shared_ptr<const WirePiece> piece, const Target& target)
    : WireReader(std::move(piece)),
      target_(target),
      offsets_(this->piece().what(), target.array.owned, target.array.strides) {
  if (!is_castable_float(target_.dtype))
    fail(ErrorCode::kInvalidArgument,
         "a tensor that travels as {} is decoded into f64, f32, f16 or bf16, not {}"_message,
         to_string(this->piece().what().format.spec.format), to_string(target_.dtype));
  extent_of(target_.dtype, target_.array.owned.extents(), target_.array.strides);
}

int64_t WireDecoder::band_bytes() const {
  return std::max<int64_t>(bytes_of(target_.dtype, piece().walk().band_elements()), 1);
}

int64_t WireDecoder::read_matrix(const std::byte* from, Index matrix, const Interval& bands) const {
  const codec::BlockFormat& format = piece().what().format;
  float amax = 0;
  if (needs_amax(format.spec.format)) std::memcpy(&amax, from + piece().amax(matrix), sizeof(amax));
  const codec::BlockDecoder decoder(format, amax);
  return for_each_box(matrix, bands, [&](const BlockBox& box) {
    decoder.decode({from + piece().codes(box), piece().row_bytes(), piece().odd(box)},
                   {from + piece().scale(matrix, box.block_row, box.block_column), piece().scale_row_bytes()},
                   matrix_box(piece().what(), box, offsets_, target_.data, target_.dtype));
  });
}

}  // namespace tessera
