// What travels of a weight: elements of a plain dtype, or the planes of a quantised format (tessera/quantize.h). A
// small value; thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <variant>

#include "tessera/dtype.h"
#include "tessera/quantize.h"

namespace tessera::etp {

// One of f32, bf16, f16, fp8_e4m3 (one scale), mxfp8, fp8_block_128x128 and nvfp4 (16x16 scaling). Sizes are of a
// weight, or of a rank's rows of it, [rows, columns] in elements. Throws Error(kInvalidArgument).
class WeightFormat {
 public:
  constexpr WeightFormat() = default;    // bf16
  explicit WeightFormat(DType dtype);    // throws for a dtype that is no GEMM's: i64, f8_e4m3, ...
  explicit WeightFormat(Format format);  // throws for the formats of activations and gradients
  static WeightFormat parse(
      std::string_view);  // those names, any case, and "fp32", "float32", ...; the error lists them
  static std::span<const WeightFormat> all();

  bool quantised() const { return std::holds_alternative<Format>(what_); }
  DType dtype() const { return std::get<DType>(what_); }     // REQUIRES: !quantised()
  Format format() const { return std::get<Format>(what_); }  // REQUIRES: quantised()
  QuantSpec spec() const;                                    // REQUIRES: quantised()
  // Whether a parameter of this dtype is published as it lies, without a copy.
  bool in_place(DType parameter) const { return what_ == std::variant<DType, Format>(parameter); }

  // Shards begin at multiples of so many rows, so that no block has rows of two shards: 16, 32 (mxfp8) or 128
  // (fp8_block_128x128).
  int64_t alignment() const;
  // Whether ranks agree on an amax before they quantise.
  bool needs_amax() const { return quantised() && tessera::needs_amax(format()); }

  // The planes that are published. Two only for mxfp8; elsewhere the column plane is the row plane, transposed by who
  // has gathered it if it is quantised.
  PlaneSet planes() const { return {.row = true, .column = !one_plane()}; }
  bool one_plane() const;
  // The plane to gather for a use of `used`: the row plane where there is only one.
  Plane gathered(Plane used) const { return one_plane() ? Plane::kRow : used; }

  // Codes and compact scales of one plane, as they go over the wire: nvfp4 0.5625 B a value, mxfp8 1.03125. An amax is
  // agreed on before and does not travel with them. Throws where nvfp4 has an odd number of columns.
  int64_t wire_bytes(Plane plane, int64_t rows, int64_t columns) const;
  // Of all planes in memory, each part at a multiple of 64 bytes (quantized_layout()); 0 if published in place.
  int64_t publication_bytes(DType parameter, int64_t rows, int64_t columns) const;

  friend bool operator==(const WeightFormat&, const WeightFormat&) = default;

 private:
  std::variant<DType, Format> what_ = DType::kBF16;
};

std::string_view to_string(const WeightFormat& format);  // the names above

}  // namespace tessera::etp
