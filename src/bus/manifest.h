// What one side of a batch registers: merged from all its ranks, compared with the other side. Pure values.
//
// Rank 0 publishes its whole manifest. Every other rank publishes the hash of its own, and only where that differs what
// it lacks and what it has otherwise: one exchange for the whole batch. docs/formats/bus-protocol.md has the bytes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "tessera/bus.h"
#include "tessera/dtype.h"
#include "tessera/layout.h"

namespace tessera::bus {

inline constexpr uint32_t kMaxTensors = 1u << 22;
inline constexpr uint32_t kMaxNameBytes = 4096;

// The tensors one rank registers, in its order. Layouts repeat, so each kind is stored once.
struct Manifest {
  std::vector<ManifestEntry> entries;

  void write(ByteWriter& out) const;
  // Everything is checked: limits, dtypes, shapes, layouts bound to their shapes, names unique.
  static Manifest read(ByteReader& in);
  // Of the serialised form, as 16 bytes (XXH3-128).
  std::string hash() const;
};

// How rank r > 0 differs from rank 0's manifest; empty where it does not.
struct ManifestDiff {
  std::vector<std::string> lacking;    // names of rank 0 that this rank does not register
  std::vector<ManifestEntry> entries;  // that rank 0 lacks, or has otherwise

  bool empty() const { return lacking.empty() && entries.empty(); }
  static ManifestDiff between(const Manifest& rank0, const Manifest& own);
  void write(ByteWriter& out) const;
  static ManifestDiff read(ByteReader& in);
};

// The side's tensors as one list: rank 0's order, then what other ranks add, by rank. diffs[r] is rank r's, diffs[0] is
// empty. A name registered with disjoint meshes and equal shape, dtype and placements becomes one entry with a leading
// "replica" axis. Throws Error(kMismatch) that lists every disagreement (job/rank, tensor and field), the first 20 in
// full.
Manifest merge(const std::string& job, const Manifest& rank0, std::span<const ManifestDiff> diffs);

// The tensors a batch moves, in the order that all ranks of both sides plan them.
struct Match {
  struct Tensor {
    std::string name;
    Shape shape;
    DType src_dtype = DType::kF32;
    DType dst_dtype = DType::kF32;
    Layout src;  // ranks of the sending job
    Layout dst;  // ranks of the receiving job
  };
  std::vector<Tensor> tensors;  // the sender's order
  int64_t skipped = 0;          // names that only the sender has
};

// Throws Error(kMismatch) that lists every name the sender lacks and every shape, dtype or layout that does not fit.
Match match(const Manifest& sender, const std::string& sender_job, const Manifest& receiver,
            const std::string& receiver_job);

}  // namespace tessera::bus
