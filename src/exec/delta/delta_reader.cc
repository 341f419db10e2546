#include "exec/delta/delta_reader.h"

#include <bit>
#include <cstring>

#include "base/fail.h"
#include "codec/simd/changes.h"
#include "exec/walk/route_walk.h"

namespace tessera {
namespace {

static_assert(DeltaPiece::kChunkAtoms * 8 <= static_cast<int64_t>(DeltaReader::kScratchBytes));

}  // namespace

DeltaReader::DeltaReader(const PullRoute& route)
    : piece_(route.what),
      elements_per_atom_(tessera::elements_per_atom(route.what.dtype)),
      dst_bytes_(atom_bytes(route.dst_dtype)),
      walk_(make_walk(route.what, {.dst = &route.dst, .dst_dtype = route.dst_dtype, .image = true},
                      Walk::Order::kRowMajor)),
      data_(route.data) {
  TESSERA_CHECK(route.combine == Combine::kCopy);
  if (route.what.dtype != route.dst_dtype) cast_ = cast_row(route.what.dtype, route.dst_dtype);
}

void DeltaReader::apply(int64_t segment, const DeltaSegment& from, std::span<std::byte> scratch,
                        Digest* of_piece) const {
  TESSERA_CHECK_LE(kScratchBytes, scratch.size());
  if (from.count == 0) return;
  const std::byte* words = from.words;
  const std::byte* values = from.values;
  for (int64_t done = 0; done < piece_.segment_atoms(segment); done += DeltaPiece::kChunkAtoms) {
    const int64_t atoms = std::min(DeltaPiece::kChunkAtoms, piece_.segment_atoms(segment) - done);
    uint64_t summary = 0;
    const int64_t at = done / DeltaPiece::kChunkAtoms * static_cast<int64_t>(sizeof(summary));
    std::memcpy(&summary, from.summaries + at, sizeof(summary));
    if (of_piece != nullptr)
      digest_bytes(*of_piece, static_cast<uint64_t>(piece_.summaries(segment) + at),
                   reinterpret_cast<const std::byte*>(&summary), sizeof(summary));
    ChunkBitmap bitmap{};
    const size_t changed = expand(summary, atoms, words, bitmap);
    if (changed == 0) continue;
    const std::byte* changes = values;
    if (cast_ != nullptr) {
      cast_(values, scratch.data(), changed);
      changes = scratch.data();
    }
    store(piece_.first_atom(segment) + done, atoms, bitmap.data(), changes);
    values += static_cast<int64_t>(changed) * piece_.atom_bytes();
  }
  if (of_piece == nullptr) return;
  const auto add = [&](int64_t offset, const std::byte* data, size_t bytes) {
    digest_bytes(*of_piece, static_cast<uint64_t>(offset), data, bytes);
  };
  add(piece_.count(segment), reinterpret_cast<const std::byte*>(&from.count), sizeof(from.count));
  add(piece_.words(segment), from.words, static_cast<size_t>(words - from.words));
  add(piece_.values(segment), from.values, static_cast<size_t>(values - from.values));
  of_piece->elements += static_cast<uint64_t>((values - from.values) / piece_.atom_bytes());
}

// Expands the bitmap of a chunk from its nonzero words. It works on a copy, so that the bits that are counted are the
// bits that are used. Bits beyond the last atom are cleared, so words and values stay within the segment's room for
// them.
size_t DeltaReader::expand(uint64_t summary, int64_t atoms, const std::byte*& words, ChunkBitmap& bitmap) {
  const auto last = static_cast<size_t>((atoms - 1) / DeltaPiece::kWordAtoms);
  summary &= summary_mask(atoms);
  for (; summary != 0; summary &= summary - 1, words += sizeof(uint64_t))
    std::memcpy(&bitmap[static_cast<size_t>(std::countr_zero(summary))], words, sizeof(uint64_t));
  if (atoms % DeltaPiece::kWordAtoms != 0) bitmap[last] &= (uint64_t{1} << (atoms % DeltaPiece::kWordAtoms)) - 1;
  size_t changed = 0;
  for (const uint64_t word : bitmap) changed += static_cast<size_t>(std::popcount(word));
  return changed;
}

// Stores the changed atoms of [first, first + atoms) of the stream.
void DeltaReader::store(int64_t first, int64_t atoms, const uint64_t* words, const std::byte* values) const {
  const auto bytes = static_cast<size_t>(dst_bytes_);
  size_t bit = 0;
  walk_.visit(first, first + atoms, [&](const Block& block) {
    std::byte* row = data_ + block.offset[kDestination];
    const int64_t row_step = block.row_step[kDestination];
    if (block.row_atoms == 1) {
      values = unpack_changes(bytes, words, bit, static_cast<size_t>(block.rows), values, row, row_step);
      bit += static_cast<size_t>(block.rows);
      return;
    }
    for (int64_t r = 0; r < block.rows; ++r, row += row_step) {
      values = unpack_changes(bytes, words, bit, static_cast<size_t>(block.row_atoms), values, row, dst_bytes_);
      bit += static_cast<size_t>(block.row_atoms);
    }
  });
}

void DeltaReader::digest(int64_t segment, Digest& digest) const {
  const int64_t first = piece_.first_atom(segment);
  const int64_t atoms = piece_.segment_atoms(segment);
  walk_.visit(first, first + atoms, [&](const Block& block) {
    digest_rows(digest, static_cast<uint64_t>(block.offset[kImage]), static_cast<uint64_t>(block.row_step[kImage]),
                data_ + block.offset[kDestination], block.row_step[kDestination],
                static_cast<size_t>(block.row_atoms * dst_bytes_), static_cast<size_t>(block.rows));
  });
  digest.elements += static_cast<uint64_t>(atoms * elements_per_atom_);
}

}  // namespace tessera
