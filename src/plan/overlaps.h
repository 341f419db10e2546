// How the parts of one tensor dim on the source side intersect those on the destination side.
#pragma once

#include <span>
#include <vector>

#include "tessera/layout.h"

namespace tessera::plan {

// The elements of one dim that are both in source part `src` and in destination part `dst`; never empty.
struct Overlap {
  int src = 0;
  int dst = 0;
  Index before = 0;  // elements of the source part in earlier overlaps
  Index size = 0;
  IntervalSet set;
};

// All overlaps of one dim, found in one sweep over the intervals of both sides.
class DimOverlaps {
 public:
  DimOverlaps(const DimPartition& src, const DimPartition& dst);

  // The overlaps of a source part, ascending by destination part. They cover the part.
  std::span<const Overlap> of_source(int part) const {
    const auto p = static_cast<size_t>(part);
    return std::span(overlaps_).subspan(source_begin_[p], source_begin_[p + 1] - source_begin_[p]);
  }
  // The overlaps of a destination part, ascending by source part.
  std::span<const Overlap* const> of_destination(int part) const {
    const auto p = static_cast<size_t>(part);
    return std::span(by_destination_).subspan(destination_begin_[p], destination_begin_[p + 1] - destination_begin_[p]);
  }
  const Overlap* find(int src, int dst) const;  // nullptr if they do not intersect
  Index source_size(int part) const { return source_size_[static_cast<size_t>(part)]; }
  // Its index in of_source(overlap.src).
  int ordinal(const Overlap& overlap) const {
    return static_cast<int>(&overlap - overlaps_.data()) -
           static_cast<int>(source_begin_[static_cast<size_t>(overlap.src)]);
  }
  // The positions at which a part of either side begins or ends, from first to last, unsorted.
  std::vector<Index> edges() const;
  size_t memory_bytes() const;

  // Has pointers into itself: movable, not copyable.
  DimOverlaps(DimOverlaps&&) noexcept = default;
  DimOverlaps& operator=(DimOverlaps&&) noexcept = default;

 private:
  std::vector<Overlap> overlaps_;  // by source part, then by destination part
  std::vector<size_t> source_begin_;
  std::vector<Index> source_size_;
  std::vector<const Overlap*> by_destination_;
  std::vector<size_t> destination_begin_;
};

}  // namespace tessera::plan
