#include "exec/delta/delta_run.h"

#include <array>
#include <cstring>
#include <utility>

#include "base/fail.h"
#include "base/rounding.h"
#include "codec/simd/changes.h"
#include "exec/units.h"
#include "exec/walk/copy_block.h"
#include "exec/walk/route_walk.h"

namespace tessera {
namespace {

constexpr int64_t kRoomStep = int64_t{64} << 10;
static_assert(DeltaPiece::kSegmentAtoms % DeltaPiece::kChunkAtoms == 0);
static_assert(DeltaPiece::kChunkAtoms * 8 <= static_cast<int64_t>(WorkerPool::kScratchBytes));

}  // namespace

struct DeltaProgram::Impl {
  // From the source into its packed stream.
  struct Part {
    DeltaPiece piece;
    int64_t elements_per_atom;
    BlockKernel kernel;
    Walk walk;
    bool cast;
  };
  bool digest = true;
  int64_t bytes = 0;
  std::vector<Part> parts;
  std::vector<Unit> units;  // of segments
};

DeltaProgram::DeltaProgram(std::span<const DeltaRoute> routes, bool digest) {
  auto impl = std::make_unique<Impl>();
  impl->digest = digest;
  std::vector<PartSize> sizes;
  for (const DeltaRoute& route : routes) {
    const DType dtype = route.what.dtype;
    const WalkArrays arrays{.src = &route.src, .dst_dtype = dtype, .image = digest};
    impl->parts.push_back(
        {.piece = DeltaPiece(route.what),
         .elements_per_atom = elements_per_atom(dtype),
         .kernel = BlockKernel(dtype, dtype, Combine::kCopy, ReduceOp::kSum, BlockKernel::Store::kCache),
         .walk = make_walk(route.what, arrays, Walk::Order::kRowMajor),
         .cast = route.cast});
    const DeltaPiece& piece = impl->parts.back().piece;
    sizes.push_back(delta_part_size(piece));
    impl->bytes += piece.full_bytes();
  }
  impl->units = cut_into_units(sizes);
  impl_ = std::move(impl);
}

DeltaProgram::~DeltaProgram() = default;

size_t DeltaProgram::routes() const {
  return impl_->parts.size();
}
const DeltaPiece& DeltaProgram::piece(size_t route) const {
  return impl_->parts[route].piece;
}
int64_t DeltaProgram::bytes() const {
  return impl_->bytes;
}

DeltaRun::DeltaRun(std::shared_ptr<const DeltaProgram> program, std::vector<Memory> memory, SparseMemory& pieces,
                   WorkerPool& pool, Done done)
    : TransferRun(pool, std::move(done), program->impl().digest ? 2 * program->routes() : 0),
      program_(std::move(program)),
      table_(program_->impl().digest ? program_->routes() : 0, SecondDigest::kPiece),
      memory_(std::move(memory)),
      pieces_(pieces),
      read_(program_->routes()),
      out_of_room_(program_->routes()) {
  TESSERA_CHECK_EQ(memory_.size(), program_->routes());
  for (size_t r = 0; r < memory_.size(); ++r) {
    const DeltaPiece& piece = program_->piece(r);
    if (!pieces_.take(memory_[r].piece, static_cast<size_t>(piece.head_bytes())))
      fail(ErrorCode::kResourceExhausted, "deltas: no memory for a bitmap of {} bytes"_message, piece.head_bytes());
    taken_.emplace_back(static_cast<size_t>(piece.segments()), 0);
  }
}

DeltaRun::~DeltaRun() = default;

int64_t DeltaRun::bytes() const {
  return program_->bytes();
}

int64_t DeltaRun::bytes_of(size_t route) const {
  const DeltaPiece& piece = program_->piece(route);
  const int64_t read = piece.count_bytes() + read_[route].load(std::memory_order_relaxed);
  if (!compares_ || out_of_room_[route].load(std::memory_order_relaxed) || read >= piece.full_bytes()) return kFull;
  return read;
}

size_t DeltaRun::units() const {
  return program_->impl().units.size();
}

void DeltaRun::prepare(uint32_t /*epoch*/) {
  for (size_t r = 0; r < read_.size(); ++r) {
    read_[r].store(0, std::memory_order_relaxed);
    out_of_room_[r].store(false, std::memory_order_relaxed);
  }
}

void DeltaRun::run_unit(size_t index, std::span<std::byte> scratch) {
  const DeltaProgram::Impl& program = program_->impl();
  const auto segments_of = [&](uint32_t p) { return program.parts[p].piece.segments(); };
  for_each_part(program.units[index], segments_of, [&](uint32_t p, int64_t first, int64_t last) {
    Digest digest;
    for (int64_t segment = first; segment < last && !aborted(); ++segment) run_segment(p, segment, scratch, digest);
    if (program.digest) add_digest(p, digest);
  });
}

void DeltaRun::run_segment(size_t route, int64_t segment, std::span<std::byte> scratch, Digest& digest) {
  const DeltaProgram::Impl::Part& part = program_->impl().parts[route];
  const DeltaPiece& piece = part.piece;
  const int64_t bytes = piece.atom_bytes();
  std::byte* const start = pieces_.data() + memory_[route].piece;
  auto* const summaries = reinterpret_cast<uint64_t*>(start + piece.summaries(segment));
  auto* const words = reinterpret_cast<uint64_t*>(start + piece.words(segment));
  std::byte* const values = start + piece.values(segment);
  Filled filled{.words = words, .values = values};
  // A delta that is already as large as the route will not be sent.
  bool packs = compares_ && read_[route].load(std::memory_order_relaxed) < piece.full_bytes();
  for (int64_t done = 0; done < piece.segment_atoms(segment); done += DeltaPiece::kChunkAtoms) {
    const Chunk chunk{piece.first_atom(segment) + done,
                      std::min(DeltaPiece::kChunkAtoms, piece.segment_atoms(segment) - done)};
    std::byte* const base = memory_[route].base + chunk.first * bytes;
    if (packs) packs = take_room(route, segment, filled.values - values + chunk.atoms * bytes);
    const std::byte* const now = read_chunk(route, chunk, packs ? scratch.data() : base, digest);
    if (packs)
      summaries[done / DeltaPiece::kChunkAtoms] = pack_chunk(now, base, chunk.atoms, bytes, filled);
    else if (now != base)
      std::memcpy(base, now, static_cast<size_t>(chunk.atoms * bytes));
  }
  digest.elements += static_cast<uint64_t>(piece.segment_atoms(segment) * part.elements_per_atom);
  add_bytes(piece.segment_atoms(segment) * bytes);
  if (!packs) return;
  const Packed packed{.words = filled.words - words, .changed = (filled.values - values) / bytes};
  const auto count = static_cast<uint32_t>(packed.changed);
  std::memcpy(start + piece.count(segment), &count, sizeof(count));
  read_[route].fetch_add(piece.read_bytes(segment, packed.words, packed.changed), std::memory_order_relaxed);
  if (!program_->impl().digest || !part.cast) return;
  Digest of_piece;
  digest_piece(route, segment, packed, of_piece);
  add_digest(table_.second(route), of_piece);
}

// Returns the chunk's summary.
uint64_t DeltaRun::pack_chunk(const std::byte* now, std::byte* base, int64_t atoms, int64_t atom_bytes,
                              Filled& filled) {
  std::array<uint64_t, DeltaPiece::kChunkAtoms / DeltaPiece::kWordAtoms> words{};
  const auto n = static_cast<size_t>(atoms);
  const auto bytes = static_cast<size_t>(atom_bytes);
  if (find_changes(bytes, now, base, n, words.data()) == 0) return 0;
  filled.values = pack_changes(bytes, now, base, n, words.data(), filled.values);
  uint64_t summary = 0;
  for (size_t w = 0; w < words.size(); ++w) {
    if (words[w] == 0) continue;
    summary |= uint64_t{1} << w;
    *filled.words++ = words[w];
  }
  return summary;
}

// The packed atoms of a chunk: in place if they are contiguous, otherwise packed at `packed`.
const std::byte* DeltaRun::read_chunk(size_t route, const Chunk& chunk, std::byte* packed, Digest& digest) const {
  const DeltaProgram::Impl::Part& part = program_->impl().parts[route];
  const std::byte* const data = memory_[route].data;
  Digest* const wanted = program_->impl().digest ? &digest : nullptr;
  const int64_t bytes = part.piece.atom_bytes();
  const std::byte* now = packed;
  part.walk.visit(chunk.first, chunk.first + chunk.atoms, [&](Block block) {
    if (block.rows == 1 && block.row_atoms == chunk.atoms) {
      now = data + block.offset[kSource];
      if (wanted != nullptr) digest_block(*wanted, block, data, bytes);
      return;
    }
    block.offset[kDestination] -= chunk.first * bytes;
    part.kernel.run(block, data, packed, wanted);
  });
  return now;
}

// Without memory left the route gets no delta; what it has taken so far stays for later versions.
bool DeltaRun::take_room(size_t route, int64_t segment, int64_t bytes) {
  int64_t& taken = taken_[route][static_cast<size_t>(segment)];
  if (bytes <= taken) return true;
  const DeltaPiece& piece = program_->piece(route);
  const int64_t wanted = std::min(round_up(bytes, kRoomStep), piece.segment_atoms(segment) * piece.atom_bytes());
  if (!pieces_.take(memory_[route].piece + static_cast<size_t>(piece.values(segment) + taken),
                    static_cast<size_t>(wanted - taken))) {
    out_of_room_[route].store(true, std::memory_order_relaxed);
    return false;
  }
  taken = wanted;
  return true;
}

void DeltaRun::digest_piece(size_t route, int64_t segment, const Packed& packed, Digest& digest) const {
  const DeltaPiece& piece = program_->piece(route);
  const std::byte* const start = pieces_.data() + memory_[route].piece;
  digest.elements = static_cast<uint64_t>(packed.changed);
  if (packed.changed == 0) return;
  const auto add = [&](int64_t offset, int64_t bytes) {
    digest_bytes(digest, static_cast<uint64_t>(offset), start + offset, static_cast<size_t>(bytes));
  };
  add(piece.count(segment), sizeof(uint32_t));
  add(piece.summaries(segment), piece.summary_bytes(segment));
  add(piece.words(segment), packed.words * static_cast<int64_t>(sizeof(uint64_t)));
  add(piece.values(segment), packed.changed * piece.atom_bytes());
}

}  // namespace tessera
