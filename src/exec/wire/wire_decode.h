// Decodes a wire piece into a local tensor of floats.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "exec/wire/wire_reader.h"

namespace tessera {

class WireDecoder final : public WireReader {
 public:
  struct Target {
    LocalArray array;           // owns the piece's region
    DType dtype = DType::kF32;  // f64, f32, f16 or bf16; computed in f32, rounded once
    std::byte* data = nullptr;  // first element
  };
  // Throws Error(kInvalidArgument) for a target of another dtype or one larger than any memory.
  WireDecoder(std::shared_ptr<const WirePiece> piece, const Target& target);

  int64_t band_bytes() const override;

 private:
  int64_t read_matrix(const std::byte* from, Index matrix, const Interval& bands) const override;

  Target target_;
  BoxOffsets offsets_;
};

}  // namespace tessera
