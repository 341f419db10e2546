// Quantises a tile: some rows and columns of a matrix that begin at whole blocks and fit into a core's caches, so that
// both planes and all phases share one read of memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "tessera/quantize.h"

namespace tessera::codec {

class TileGrid {
 public:
  TileGrid(const MatrixView& matrix, const QuantSpec& spec, const Planes& planes);

  size_t size() const { return static_cast<size_t>(down_ * across_); }

  struct Tile {
    int64_t row;
    int64_t column;
    int64_t rows;
    int64_t columns;
  };
  Tile tile(size_t index) const;

  const MatrixView& matrix() const { return matrix_; }
  const QuantSpec& spec() const { return spec_; }
  const Planes& planes() const { return planes_; }

 private:
  const MatrixView matrix_;
  const QuantSpec spec_;
  const Planes planes_;
  int64_t tile_rows_;
  int64_t tile_columns_;
  int64_t down_;
  int64_t across_;
};

// Whole blocks of every format.
inline constexpr size_t kPieceColumns = 1024;

// Belongs to one thread.
struct TileScratch {
  std::array<float, kPieceColumns> amax;
  std::array<float, kPieceColumns> multipliers;
  std::array<float, kPieceColumns> magnitudes;  // of any of the input types
  std::vector<std::byte> row_codes;
  std::vector<std::byte> row_scales;
  std::vector<std::byte> column_codes;
  std::vector<std::byte> input;  // transposed
  std::vector<std::byte> transformed;
};

// True if the tile holds a NaN or an infinity. (For formats with one scale, only checked if the spec refuses them.)
bool quantize_tile(const TileGrid& grid, size_t index, PlaneAmax amax, const Origin& origin, TileScratch& scratch);

}  // namespace tessera::codec
