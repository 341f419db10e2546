#include "exec/delta_reader.h"

#include <array>
#include <bit>
#include <cstring>

#include "base/fail.h"
#include "codec/changes.h"
#include "exec/route_walk.h"

namespace tessera {
namespace {

constexpr int64_t kChunkWords = DeltaPiece::kChunkAtoms / 64;
static_assert(DeltaPiece::kChunkAtoms * 8 <= static_cast<int64_t>(DeltaReader::kScratchBytes));

}  // namespace

DeltaReader::DeltaReader(const PullRoute& route, const std::byte* from)
    : piece_(route.what),
      from_(from),
      elements_per_atom_(tessera::elements_per_atom(route.what.dtype)),
      dst_bytes_(atom_bytes(route.dst_dtype)),
      walk_(make_walk(route.what, {.dst = &route.dst, .dst_dtype = route.dst_dtype, .image = true},
                      Walk::Order::kRowMajor)),
      data_(route.data) {
  TESSERA_CHECK(route.combine == Combine::kCopy);
  if (route.what.dtype != route.dst_dtype) cast_ = cast_row(route.what.dtype, route.dst_dtype);
}

void DeltaReader::apply(int64_t segment, std::span<std::byte> scratch, Digest* of_piece) const {
  TESSERA_CHECK_LE(kScratchBytes, scratch.size());
  uint32_t count = 0;
  std::memcpy(&count, from_ + piece_.count(segment), sizeof(count));
  if (count == 0) return;
  const int64_t bytes = piece_.atom_bytes();
  const std::byte* values = from_ + piece_.values(segment);
  for (int64_t done = 0; done < piece_.segment_atoms(segment); done += DeltaPiece::kChunkAtoms) {
    const int64_t atoms = std::min(DeltaPiece::kChunkAtoms, piece_.segment_atoms(segment) - done);
    const auto chunk_words = static_cast<size_t>((atoms + 63) / 64);
    // A copy, so that what is counted is what is taken. No bit stands behind the last atom, whatever was read: so the
    // values end where the segment's room for them does.
    std::array<uint64_t, kChunkWords> words;
    std::memcpy(words.data(), from_ + piece_.words(segment) + done / 8, chunk_words * sizeof(uint64_t));
    if (of_piece != nullptr)
      digest_bytes(*of_piece, static_cast<uint64_t>(piece_.words(segment) + done / 8),
                   reinterpret_cast<const std::byte*>(words.data()), chunk_words * sizeof(uint64_t));
    if (atoms % 64 != 0) words[chunk_words - 1] &= (uint64_t{1} << (atoms % 64)) - 1;
    size_t changed = 0;
    for (size_t w = 0; w < chunk_words; ++w) changed += static_cast<size_t>(std::popcount(words[w]));
    if (changed == 0) continue;
    const std::byte* from = values;
    if (cast_ != nullptr) {
      cast_(values, scratch.data(), changed);
      from = scratch.data();
    }
    store(piece_.first_atom(segment) + done, atoms, words.data(), from);
    values += static_cast<int64_t>(changed) * bytes;
  }
  if (of_piece == nullptr) return;
  const std::byte* const first = from_ + piece_.values(segment);
  digest_bytes(*of_piece, static_cast<uint64_t>(piece_.count(segment)), reinterpret_cast<const std::byte*>(&count),
               sizeof(count));
  digest_bytes(*of_piece, static_cast<uint64_t>(piece_.values(segment)), first, static_cast<size_t>(values - first));
  of_piece->elements += static_cast<uint64_t>((values - first) / bytes);
}

// The changed ones of atoms [first, first + atoms) of the stream.
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
