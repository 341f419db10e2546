#include "exec/delta/delta_stream.h"

#include <algorithm>

namespace tessera {
namespace {

constexpr auto kWordBytes = static_cast<int64_t>(sizeof(uint64_t));

uint32_t count_of(const DeltaPiece& piece, const std::byte* counts, int64_t segment) {
  uint32_t count = 0;
  std::memcpy(&count, counts + piece.count(segment), sizeof(count));
  return count;
}

}  // namespace

int64_t max_segment_bytes(const DeltaPiece& piece) {
  const int64_t atoms = std::min(DeltaPiece::kSegmentAtoms, piece.atoms());
  const int64_t words = (atoms + DeltaPiece::kWordAtoms - 1) / DeltaPiece::kWordAtoms;
  return piece.atoms() == 0 ? 0 : piece.summary_bytes(0) + words * kWordBytes + atoms * piece.atom_bytes();
}

DeltaPacker::DeltaPacker(const DeltaPiece& piece, const std::byte* from)
    : piece_(piece), from_(from), section_(from + piece.count(0), static_cast<size_t>(piece.count_bytes())) {}

bool DeltaPacker::take(std::span<std::byte> out) {
  while (!out.empty()) {
    if (section_.empty() && !next_section()) return false;
    const size_t taken = std::min(out.size(), section_.size());
    std::memcpy(out.data(), section_.data(), taken);
    out = out.subspan(taken);
    section_ = section_.subspan(taken);
  }
  return true;
}

// Finds the next part to read, in this segment or a later one.
bool DeltaPacker::next_section() {
  if (part_ == kParts) {
    do {
      if (++segment_ >= piece_.segments()) return false;
    } while (count_of(piece_, from_, segment_) == 0);
    part_ = 0;
  }
  const DeltaSegment segment = DeltaSegment::of_piece(piece_, from_, segment_);
  const int64_t words = bitmap_words(piece_, segment_, segment.summaries);
  const auto part = [](const std::byte* data, int64_t bytes) { return std::span(data, static_cast<size_t>(bytes)); };
  const std::span<const std::byte> parts[kParts] = {
      part(segment.summaries, piece_.summary_bytes(segment_)), part(segment.words, words * kWordBytes),
      part(segment.values, std::min<int64_t>(segment.count, piece_.segment_atoms(segment_)) * piece_.atom_bytes())};
  section_ = parts[part_++];
  return true;
}

void DeltaUnpacker::reserve(const DeltaPiece& piece) {
  counts_.resize(std::max(counts_.size(), static_cast<size_t>(piece.count_bytes())));
  bytes_.resize(std::max(bytes_.size(), static_cast<size_t>(max_segment_bytes(piece))));
}

void DeltaUnpacker::begin(const DeltaPiece& piece) {
  piece_ = &piece;
  section_ = Section::kCounts;
  segment_ = -1;
  held_ = 0;
  wanted_ = static_cast<size_t>(piece.count_bytes());
  if (wanted_ == 0) next_segment();
}

void DeltaUnpacker::next_segment() {
  do {
    ++segment_;
    count_ = whole() ? 0 : count_of(*piece_, counts_.data(), segment_);
  } while (!whole() && count_ == 0);
  section_ = Section::kSummaries;
  held_ = 0;
  wanted_ = whole() ? 0 : static_cast<size_t>(piece_->summary_bytes(segment_));
}

}  // namespace tessera
