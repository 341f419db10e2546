// A walk over the elements of a region, row-major, through up to three arrays at once: the source, the destination and
// the tensor's row-major image (the subject of digests). Compiled once for each route; regular structure is folded, so
// that a walk yields few and large blocks.
//
// Elements are counted in atoms: an element, or a pair for f4.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "exec/walk/route.h"

namespace tessera {

// The arrays that a walk goes through. Offsets count in bytes from each array's first element.
enum Array : uint8_t { kSource, kDestination, kImage };
inline constexpr size_t kArrays = 3;
using Offsets = std::array<int64_t, kArrays>;

// `rows` rows of `row_atoms` atoms, `row_step` bytes apart (any sign). Within a row, atoms are contiguous in every
// array; if an array has gaps between them, rows are single atoms.
struct Block {
  Offsets offset{};
  Offsets row_step{};
  int64_t row_atoms = 0;
  int64_t rows = 0;
};

// One dim of the region, as one array has it.
struct DimView {
  const IntervalSet* owned = nullptr;  // null: the array is not walked
  int64_t stride = 0;
};

// Immutable, hence thread-safe.
class Walk {
 public:
  enum class Order : uint8_t {
    kRowMajor,  // atoms are numbered row-major over the region, as both ends of a stream agree
    kFree,      // numbered so that blocks become largest
  };
  Walk() = default;  // no atoms
  // `dims[d][array]`; intervals count in atoms of `atom_bytes[array]` bytes, and strides in bytes. Throws
  // Error(kInvalidArgument) if offsets exceed 2^58 bytes.
  Walk(std::span<const IntervalSet> region, std::span<const std::array<DimView, kArrays>> dims,
       const Offsets& atom_bytes, Order order);

  int64_t atoms() const { return atoms_; }
  int64_t row_atoms() const { return levels_.empty() ? 1 : levels_.back().longest; }  // in its longest row
  // The bytes around an array's first element that the walk touches; `atom_bytes` is the size of one atom.
  ByteExtent extent(Array array, int64_t atom_bytes) const;
  size_t memory_bytes() const;

  // Calls visit(const Block&) for blocks that together cover the atoms numbered [first, last), in order.
  template <typename Visit>
  void visit(int64_t first, int64_t last, Visit&& visit) const;

 private:
  // `count` steps of a level's stride, from `offset` on.
  struct Run {
    int64_t first = 0;  // steps of the level before this run
    int64_t count = 0;
    Offsets offset{};
  };
  struct Level {
    uint32_t first_run = 0;
    uint32_t runs = 0;
    int64_t count = 0;    // steps of all its runs
    int64_t longest = 0;  // steps of one run
    Offsets stride{};
  };
  struct Draft;

  static void merge_runs(Draft& draft);
  static void collapse(std::vector<Draft>& drafts);
  static void fold(std::vector<Draft>& drafts);
  static void prefer_long_rows(std::vector<Draft>& drafts);
  void adopt(const std::vector<Draft>& drafts);

  const Run& run_of(const Level& level, int64_t step) const;
  template <typename Visit>
  void visit_row(const Offsets& base, int64_t first, int64_t last, Visit& visit) const;

  std::vector<Level> levels_;  // outermost first; the runs of the last one are rows
  std::vector<Run> runs_;
  Offsets base_{};
  int64_t atoms_ = 0;
};

}  // namespace tessera

#include "exec/walk/walk-inl.h"
