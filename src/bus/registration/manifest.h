// What one side of a batch registers: merged from all its ranks, compared with the other side. Pure values.
//
// Rank 0 publishes its whole manifest. Every other rank publishes the hash of its own, and only where that differs what
// it lacks and what it has otherwise: one exchange for the whole batch. docs/formats/bus-protocol.md has the bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "tessera/bus.h"
#include "tessera/dtype.h"
#include "tessera/layout.h"

namespace tessera::bus {

inline constexpr uint32_t kMaxTensors = 1u << 22;
inline constexpr uint32_t kMaxNameBytes = 4096;
inline constexpr int64_t kMaxSourceRanks = int64_t{1} << 26;  // of the meshes of all that a batch names as sources

// In messages that have tensors. `tensor` is whose source it is.
void write_source(const TensorSource& source, ByteWriter& out);
TensorSource read_source(ByteReader& in, std::string_view tensor);
inline constexpr size_t kLeastSource = 4 + 1;  // bytes
// What is asked of a tensor's way.
struct WireAsked {
  std::optional<Format> format = std::nullopt;
  PlaneSet planes = {};
  FusedPart fused = {};
};
void write_wire(const WireAsked& wire, ByteWriter& out);
WireAsked read_wire(ByteReader& in, std::string_view tensor);

// Whether a format may be asked for: others travel as they are.
bool can_be_quantised(DType dtype, const Shape& shape);

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
  // A tensor of the sender's of which a part alone is taken.
  struct Whole {
    Shape shape;
    Layout layout;
    std::vector<Slice> slices;
  };
  struct Tensor {
    std::string name = {};    // the receiver's
    std::string source = {};  // the sender's
    Shape shape;
    DType src_dtype = DType::kF32;
    DType dst_dtype = DType::kF32;
    Layout src;                                 // ranks of the sending job
    Layout dst;                                 // ranks of the receiving job
    std::optional<Whole> of = std::nullopt;     // that `shape` and `src` are a slice of
    std::optional<Format> wire = std::nullopt;  // what it is quantised to on its way
    PlaneSet planes = {};                       // that are received as they are; none: floats
    // What travels is the transpose of the last two dims, as are `shape`, `src` and `dst`: a column plane whose blocks
    // are not those of the row plane.
    bool transposed = false;
    // It is quantised as one with others: their group is the first one's place in `tensors`, its own where there are
    // none. With a place it has blocks together with them, too.
    uint32_t group = 0;
    std::optional<FusedPart::Place> fused = std::nullopt;
  };
  std::vector<Tensor> tensors;  // the sender's order; of one source, the receiver's
  int64_t skipped = 0;          // names that only the sender has
};

// Throws Error(kMismatch) that lists every name the sender lacks, every shape, dtype, layout or wire format that does
// not fit, and every slice that cannot be taken.
Match match(const Manifest& sender, const std::string& sender_job, const Manifest& receiver,
            const std::string& receiver_job);

}  // namespace tessera::bus
