// A delta that cannot be mapped travels as the bytes of its piece that are read, packed: the counts of all segments,
// then the summaries, words and values of each segment that has changed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "exec/delta/delta_piece.h"

namespace tessera {

// The size of the largest possible segment.
int64_t max_segment_bytes(const DeltaPiece& piece);

// Reads those bytes from a piece, in order.
class DeltaPacker {
 public:
  DeltaPacker(const DeltaPiece& piece, const std::byte* from);

  // The next out.size() bytes. Returns false if there are fewer.
  bool take(std::span<std::byte> out);

 private:
  bool next_section();

  const DeltaPiece piece_;
  const std::byte* const from_;
  std::span<const std::byte> section_;  // the rest of the current section
  int64_t segment_ = -1;
  int part_ = kParts;  // of the segment: how many of summaries, words and values were read
  static constexpr int kParts = 3;
};

// Assembles segments from bytes as they arrive, in order. Reused from one delta to the next: allocates in reserve()
// only.
class DeltaUnpacker {
 public:
  void reserve(const DeltaPiece& piece);
  // REQUIRES: reserve() was called for it
  void begin(const DeltaPiece& piece);
  // Calls apply(segment, DeltaSegment) for each segment once it is complete. Returns false if there are more bytes than
  // the delta has.
  template <typename Apply>
  bool add(std::span<const std::byte> bytes, const Apply& apply);
  bool whole() const { return segment_ == piece_->segments(); }

 private:
  void next_segment();

  enum class Section { kCounts, kSummaries, kRest };
  const DeltaPiece* piece_ = nullptr;
  Section section_ = Section::kCounts;
  int64_t segment_ = 0;  // the current one, which has changed
  int64_t words_ = 0;    // of its bitmap
  size_t held_ = 0;      // bytes so far of the current section or segment
  size_t wanted_ = 0;
  std::vector<std::byte> counts_, bytes_;
  uint32_t count_ = 0;
};

template <typename Apply>
bool DeltaUnpacker::add(std::span<const std::byte> bytes, const Apply& apply) {
  while (!bytes.empty()) {
    if (whole()) return false;
    std::byte* const to = section_ == Section::kCounts ? counts_.data() : bytes_.data();
    const size_t taken = std::min(bytes.size(), wanted_ - held_);
    std::memcpy(to + held_, bytes.data(), taken);
    bytes = bytes.subspan(taken);
    held_ += taken;
    if (held_ < wanted_) break;
    if (section_ == Section::kSummaries) {
      words_ = bitmap_words(*piece_, segment_, bytes_.data());
      const int64_t changed = std::min<int64_t>(count_, piece_->segment_atoms(segment_));
      wanted_ = static_cast<size_t>(piece_->read_bytes(segment_, words_, changed));
      section_ = Section::kRest;
      continue;
    }
    if (section_ == Section::kRest) {
      const std::byte* const words = bytes_.data() + piece_->summary_bytes(segment_);
      apply(segment_, DeltaSegment{.count = count_,
                                   .summaries = bytes_.data(),
                                   .words = words,
                                   .values = words + words_ * static_cast<int64_t>(sizeof(uint64_t))});
    }
    next_segment();
  }
  return true;
}

}  // namespace tessera
