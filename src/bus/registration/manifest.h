// What a rank registers of a batch, and how that differs from what rank 0 does. Pure values.
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

// All of them, the source and what is asked of the way too.
bool equal(const ManifestEntry& a, const ManifestEntry& b);

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

}  // namespace tessera::bus
