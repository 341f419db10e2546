// The sender's side of deltas: one pass over what it sends and over the *base*, the bits that it sent last, packed as
// the route's stream. It writes what has changed into a delta piece (exec/delta/delta_piece.h), copies the new bits
// into the base, and digests them.
//
// A route whose delta would not be smaller than the route itself has no delta: bytes_of() returns kFull.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "exec/delta/delta_piece.h"
#include "exec/digests.h"
#include "exec/transfer_run.h"
#include "memory/host/sparse_memory.h"

namespace tessera {

struct DeltaRoute {
  RouteRegion what{};
  LocalArray src{};
  bool cast = false;  // some receiver casts it: the piece gets a digest, too
};

// Compiled once at registration. Immutable, hence thread-safe.
class DeltaProgram {
 public:
  DeltaProgram(std::span<const DeltaRoute> routes, bool digest);
  ~DeltaProgram();

  size_t routes() const;
  const DeltaPiece& piece(size_t route) const;
  int64_t bytes() const;  // of all routes in full

  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  std::unique_ptr<const Impl> impl_;
};

// digests(): one for each route and one for each piece (DigestTable): the latter of the bytes that are read, at their
// offsets in the piece, with the number of changed atoms; all 0 if it is not cast. Both are 0 if the program has no
// digests.
class DeltaRun final : public TransferRun {
 public:
  static constexpr int64_t kFull = -1;
  struct Memory {
    const std::byte* data = nullptr;  // the local tensor's first element
    std::byte* base = nullptr;        // DeltaPiece::full_bytes()
    size_t piece = 0;                 // offset in `pieces`
  };
  // Allocates the heads of all pieces in `pieces`, and room for values on demand. Throws Error(kResourceExhausted).
  // `pieces` must outlive it.
  DeltaRun(std::shared_ptr<const DeltaProgram> program, std::vector<Memory> memory, SparseMemory& pieces,
           WorkerPool& pool, Done done);
  ~DeltaRun() override;

  // Before start(): whether the base holds the previous version. If not, it is only filled, and there are no deltas.
  void compare(bool compares) { compares_ = compares; }

  int64_t bytes() const override;  // in the sources' dtypes
  // The bytes of the route's piece that a receiver reads; kFull if it has to read the route itself.
  int64_t bytes_of(size_t route) const;
  // REQUIRES: it has digests
  const Digest& piece_digest(size_t route) const { return digests()[table_.second(route)]; }

 private:
  // Atoms of one segment that are gathered, compared and digested at a time.
  struct Chunk {
    int64_t first = 0;  // in the route's stream
    int64_t atoms = 0;
  };

  // How many words and values of a segment have been written.
  struct Filled {
    uint64_t* words;
    std::byte* values;
  };
  struct Packed {
    int64_t words = 0;
    int64_t changed = 0;  // atoms
  };

  size_t units() const override;
  void run_unit(size_t index, std::span<std::byte> scratch) override;
  void prepare(uint32_t epoch) override;
  void interrupt(const Status& /*status*/) override {}
  void run_segment(size_t route, int64_t segment, std::span<std::byte> scratch, Digest& digest);
  const std::byte* read_chunk(size_t route, const Chunk& chunk, std::byte* packed, Digest& digest) const;
  bool take_room(size_t route, int64_t segment, int64_t bytes);
  static uint64_t pack_chunk(const std::byte* now, std::byte* base, int64_t atoms, int64_t atom_bytes, Filled& filled);
  void digest_piece(size_t route, int64_t segment, const Packed& packed, Digest& digest) const;

  std::shared_ptr<const DeltaProgram> program_;
  const DigestTable table_;  // empty without digests
  std::vector<Memory> memory_;
  SparseMemory& pieces_;
  bool compares_ = false;
  std::vector<std::vector<int64_t>> taken_;     // by route and segment: bytes of values whose pages are allocated
  std::vector<std::atomic<int64_t>> read_;      // by route: bytes of its piece that are read
  std::vector<std::atomic<bool>> out_of_room_;  // by route
};

}  // namespace tessera
