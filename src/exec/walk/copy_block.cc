#include "exec/walk/copy_block.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/fail.h"
#include "codec/simd/stream.h"
#include "exec/walk/route_walk.h"

namespace tessera {
namespace {

constexpr int64_t kL1Bytes = 16 << 10;    // read twice: the second time from L1
constexpr int64_t kL2Bytes = 256 << 10;   // likewise, from L2
constexpr int64_t kStreamRow = 256;       // rows of at least this size are worth streaming
constexpr int64_t kAtomsAtOnce = 256;     // gathered and scattered together
constexpr int64_t kPrefetchBytes = 2048;  // prefetch distance of a plain copy
constexpr int64_t kPieceBytes = 4096;     // of a converted row; the next part is prefetched meanwhile
constexpr int64_t kPrefetchStep = 64;

template <typename T>
void move_atoms(const std::byte* src, int64_t src_step, std::byte* dst, int64_t dst_step, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    T atom;
    std::memcpy(&atom, src + i * src_step, sizeof(T));
    std::memcpy(dst + i * dst_step, &atom, sizeof(T));
  }
}

// Moves atoms that are not contiguous on at least one side.
void move_atoms(int64_t bytes, const std::byte* src, int64_t src_step, std::byte* dst, int64_t dst_step,
                int64_t count) {
  switch (bytes) {
    case 1:
      return move_atoms<uint8_t>(src, src_step, dst, dst_step, count);
    case 2:
      return move_atoms<uint16_t>(src, src_step, dst, dst_step, count);
    case 4:
      return move_atoms<uint32_t>(src, src_step, dst, dst_step, count);
    case 8:
      return move_atoms<uint64_t>(src, src_step, dst, dst_step, count);
    default:
      TESSERA_CHECK(false);
  }
}

void prefetch_row(const std::byte* row, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += kPrefetchStep) __builtin_prefetch(row + at);
}

// Copies rows into a destination that stays in the cache.
void copy_rows(const std::byte* src, int64_t src_step, std::byte* dst, int64_t dst_step, int64_t row_bytes,
               int64_t rows) {
  const int64_t ahead = std::max<int64_t>(kPrefetchBytes / row_bytes, 1);
  const int64_t prefetched = std::min(row_bytes, kPrefetchBytes);
  for (int64_t r = 0; r < std::min(ahead, rows); ++r) prefetch_row(src + r * src_step, prefetched);
  for (int64_t r = 0; r < rows; ++r) {
    if (r + ahead < rows) prefetch_row(src + (r + ahead) * src_step, prefetched);
    std::memcpy(dst + r * dst_step, src + r * src_step, static_cast<size_t>(row_bytes));
  }
}

// Calls visit for parts of `block` of at most `bytes` source bytes each.
template <typename Visit>
void split_block(const Block& block, const Offsets& atom_bytes, int64_t bytes, Visit visit) {
  const int64_t row_bytes = block.row_atoms * atom_bytes[kSource];
  const int64_t rows_at_once = std::max<int64_t>(bytes / row_bytes, 1);
  const int64_t atoms_at_once = row_bytes <= bytes ? block.row_atoms : bytes / atom_bytes[kSource];
  for (int64_t row = 0; row < block.rows; row += rows_at_once) {
    for (int64_t atom = 0; atom < block.row_atoms; atom += atoms_at_once) {
      Block part = block;
      add_steps(part.offset, block.row_step, row);
      add_steps(part.offset, atom_bytes, atom);
      part.rows = std::min(rows_at_once, block.rows - row);
      part.row_atoms = std::min(atoms_at_once, block.row_atoms - atom);
      visit(part);
    }
  }
}

}  // namespace

void digest_block(Digest& digest, const Block& block, const std::byte* src, int64_t atom_bytes,
                  const DigestSample* sample) {
  const auto offset = static_cast<uint64_t>(block.offset[kImage]), step = static_cast<uint64_t>(block.row_step[kImage]);
  const std::byte* const from = src + block.offset[kSource];
  const auto row_bytes = static_cast<size_t>(block.row_atoms * atom_bytes);
  const auto rows = static_cast<size_t>(block.rows);
  if (sample != nullptr)
    digest_sampled_rows(digest, *sample, offset, step, from, block.row_step[kSource], row_bytes, rows);
  else
    digest_rows(digest, offset, step, from, block.row_step[kSource], row_bytes, rows);
}

BlockKernel::BlockKernel(DType from, DType to, Combine combine, ReduceOp op, Store store)
    : store_(store),
      src_bytes_(static_cast<uint8_t>(atom_bytes(from))),
      dst_bytes_(static_cast<uint8_t>(atom_bytes(to))) {
  if (combine != Combine::kCopy) {
    kind_ = Kind::kAccumulate;
    convert_ = accumulate_row(op, from, combine == Combine::kFirst);
    if (to != accumulator_of(from))
      fail(ErrorCode::kInvalidArgument, "reducing {} needs an accumulator of {}, not {}"_message, to_string(from),
           to_string(accumulator_of(from)), to_string(to));
  } else if (from != to) {
    kind_ = Kind::kCast;
    convert_ = cast_row(from, to);
    convert_long_ = store == Store::kStream ? cast_row_stream(from, to) : convert_;
  }
}

void BlockKernel::run(const Block& block, const std::byte* src, std::byte* dst, Digest* digest,
                      const DigestSample* sample) const {
  if (kind_ == Kind::kCopy) {
    copy(block, src, dst, digest, sample);
  } else {
    convert(block, src, dst, digest, sample);
  }
}

void BlockKernel::copy(const Block& block, const std::byte* src, std::byte* dst, Digest* digest,
                       const DigestSample* sample) const {
  const int64_t row_bytes = block.row_atoms * src_bytes_;
  const auto bytes = static_cast<size_t>(row_bytes);
  const auto rows = static_cast<size_t>(block.rows);
  const std::byte* from = src + block.offset[kSource];
  std::byte* to = dst + block.offset[kDestination];
  const int64_t src_step = block.row_step[kSource];
  const int64_t dst_step = block.row_step[kDestination];
  if (block.row_atoms == 1) {
    if (digest != nullptr) digest_block(*digest, block, src, src_bytes_, sample);
    move_atoms(src_bytes_, from, src_step, to, dst_step, block.rows);
  } else if (store_ == Store::kCache) {
    split_block(block, {src_bytes_, src_bytes_, src_bytes_}, kL1Bytes, [&](const Block& part) {
      const int64_t part_bytes = part.row_atoms * src_bytes_;
      if (digest != nullptr) digest_block(*digest, part, src, src_bytes_, sample);
      copy_rows(src + part.offset[kSource], src_step, dst + part.offset[kDestination], dst_step, part_bytes, part.rows);
    });
  } else if (digest != nullptr && sample == nullptr) {
    digest_copy_rows(*digest, static_cast<uint64_t>(block.offset[kImage]),
                     static_cast<uint64_t>(block.row_step[kImage]), to, dst_step, from, src_step, bytes, rows);
  } else if (digest != nullptr) {
    // Behind the copy, what is in the sample comes from the cache.
    split_block(block, {src_bytes_, src_bytes_, src_bytes_}, kL2Bytes, [&](const Block& part) {
      copy_stream_rows(dst + part.offset[kDestination], dst_step, src + part.offset[kSource], src_step,
                       static_cast<size_t>(part.row_atoms * src_bytes_), static_cast<size_t>(part.rows));
      digest_block(*digest, part, src, src_bytes_, sample);
    });
  } else {
    copy_stream_rows(to, dst_step, from, src_step, bytes, rows);
  }
}

void BlockKernel::convert(const Block& block, const std::byte* src, std::byte* dst, Digest* digest,
                          const DigestSample* sample) const {
  split_block(block, {src_bytes_, dst_bytes_, src_bytes_}, kL1Bytes, [&](const Block& part) {
    if (digest != nullptr) digest_block(*digest, part, src, src_bytes_, sample);
    if (part.row_atoms == 1) return convert_atoms(part, src, dst);
    // What is digested is in the cache by now, so the memory bus is free for the next part.
    const bool rows_on = part.row_atoms == block.row_atoms;
    const int64_t next_part = rows_on ? part.rows * part.row_step[kSource] : part.row_atoms * src_bytes_;
    convert_rows(part, src, dst, digest != nullptr && sample == nullptr ? next_part : 0);
  });
}

void BlockKernel::convert_rows(const Block& block, const std::byte* src, std::byte* dst, int64_t ahead) const {
  const bool is_long = kind_ == Kind::kCast && block.row_atoms * dst_bytes_ >= kStreamRow;
  const auto convert = is_long ? convert_long_ : convert_;
  const int64_t piece = ahead == 0 ? block.row_atoms : kPieceBytes / src_bytes_;
  const int64_t prefetched = std::min(block.row_atoms * src_bytes_, kPrefetchBytes);
  const std::byte* from = src + block.offset[kSource];
  std::byte* to = dst + block.offset[kDestination];
  for (int64_t r = 0; r < block.rows; ++r) {
    if (ahead == 0 && r + 1 < block.rows) prefetch_row(from + block.row_step[kSource], prefetched);
    for (int64_t atom = 0; atom < block.row_atoms; atom += piece) {
      const int64_t count = std::min(piece, block.row_atoms - atom);
      if (ahead != 0) prefetch_row(from + ahead + atom * src_bytes_, count * src_bytes_);
      convert(from + atom * src_bytes_, to + atom * dst_bytes_, static_cast<size_t>(count));
    }
    from += block.row_step[kSource];
    to += block.row_step[kDestination];
  }
}

void BlockKernel::convert_atoms(const Block& block, const std::byte* src, std::byte* dst) const {
  alignas(64) std::array<std::byte, kAtomsAtOnce * 8> from;
  alignas(64) std::array<std::byte, kAtomsAtOnce * 8> to;
  for (int64_t done = 0; done < block.rows; done += kAtomsAtOnce) {
    const int64_t count = std::min(kAtomsAtOnce, block.rows - done);
    const std::byte* first = src + block.offset[kSource] + done * block.row_step[kSource];
    std::byte* out = dst + block.offset[kDestination] + done * block.row_step[kDestination];
    move_atoms(src_bytes_, first, block.row_step[kSource], from.data(), src_bytes_, count);
    if (kind_ == Kind::kAccumulate)
      move_atoms(dst_bytes_, out, block.row_step[kDestination], to.data(), dst_bytes_, count);
    convert_(from.data(), to.data(), static_cast<size_t>(count));
    move_atoms(dst_bytes_, to.data(), dst_bytes_, out, block.row_step[kDestination], count);
  }
}

}  // namespace tessera
