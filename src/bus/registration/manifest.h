// What a rank registers of a batch, and how that differs from rank 0's. Pure values.
//
// Rank 0 publishes its whole manifest. Every other rank publishes the hash of its own and, only if that differs, what
// it lacks and what differs: one exchange for the whole batch. docs/formats/bus-protocol.md defines the bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/fields.h"
#include "base/message.h"
#include "bus/registration/layout_table.h"
#include "tessera/bus.h"
#include "tessera/dtype.h"
#include "tessera/layout.h"

namespace tessera::bus {

inline constexpr uint32_t kMaxNameBytes = 4096;
inline constexpr int64_t kMaxSourceRanks = int64_t{1} << 26;  // over the meshes of all sources of a batch

// The least size of a tensor's source in any message (of a ManifestEntry or a TensorSpec).
inline constexpr size_t kLeastSource = 4 + 1;  // bytes
template <typename Fields, typename Tensor>
void source_field(Fields& f, Tensor& tensor) {
  f("source", tensor.source.name, kMaxNameBytes);
  short_list_field(
      f, "slices", tensor.source.slices,
      [&](uint8_t dims) {
        f.require(dims <= kMaxDims, "tensor {}: a slice of {} dims, at most {} are known"_message, tensor.name, dims,
                  kMaxDims);
      },
      [](auto& g, auto& slice) {
        g("begin", slice.begin);
        g("end", slice.end);
        g("step", slice.step);
        g("dropped", slice.dropped);
      });
}

// The format, the planes and the fused tensor of what travels; one byte says which of them follow.
class WireByte {
 public:
  WireByte(std::optional<Format> format, PlaneSet planes, const FusedPart& fused);

  static constexpr Index kMaxPlace = Index{1} << 31;  // so that amax keys can number the blocks

  template <typename Fields, typename Tensor>
  static void field(Fields& f, Tensor& tensor) {
    WireByte wire(tensor.wire, tensor.planes, tensor.fused);
    f("wire", wire.byte_);
    f.require(wire.is_known(), "tensor {}: unknown wire format {}"_message, tensor.name, wire.byte_);
    if constexpr (kFills<Fields>) wire.fill(tensor.wire, tensor.planes, tensor.fused);
    if (wire.has(kFused)) f("fused", tensor.fused.name, kMaxNameBytes);
    if (!tensor.fused.place || !wire.has(kPlaced)) return;
    auto& [row, column] = *tensor.fused.place;
    f("row", row);
    f("column", column);
    f.require(std::min(row, column) >= 0 && std::max(row, column) <= kMaxPlace,
              "tensor {}: a part of a fused matrix at [{}, {}]"_message, tensor.name, row, column);
  }

 private:
  static constexpr uint8_t kRowPlane = 16;
  static constexpr uint8_t kColumnPlane = 32;
  static constexpr uint8_t kFused = 64;
  static constexpr uint8_t kPlaced = 128;

  bool has(uint8_t flag) const { return (byte_ & flag) != 0; }
  size_t format() const { return byte_ & ~(kRowPlane | kColumnPlane | kFused | kPlaced); }  // from 1; 0: none
  bool is_known() const;
  void fill(std::optional<Format>& format, PlaneSet& planes, FusedPart& fused) const;

  uint8_t byte_ = 0;
};

// Throws Error(kInvalidArgument).
void require_unique_names(std::span<const ManifestEntry> entries);

// All tensors, after their layouts.
template <typename Fields, typename Entries>
void entries_field(Fields& f, Entries& entries) {
  constexpr size_t kLeastEntry = 4 + 1 + 1 + 4 + kLeastSource + 1;  // bytes
  LayoutTable layouts("manifest");
  if constexpr (!kFills<Fields>)
    for (const ManifestEntry& entry : entries) layouts.add(entry.layout);
  LayoutTable::fields(f, layouts);
  f.each("entries", entries, kMaxTensors, kLeastEntry, [&](auto& g, auto& entry) {
    g("name", entry.name, kMaxNameBytes);
    g("dtype", entry.dtype, kLastDType);
    short_list_field(g, "shape", entry.shape, [&](uint8_t dims) {
      g.require(dims <= kMaxDims, "manifest: tensor {} has {} dims, at most {} are known"_message, entry.name, dims,
                kMaxDims);
    });
    if constexpr (kReads<Fields>) element_count(entry.shape);
    layouts.field(g, entry.name, entry.layout);
    if constexpr (kReads<Fields>) entry.layout = entry.layout.bind(entry.shape);
    source_field(g, entry);
    WireByte::field(g, entry);
  });
  if constexpr (kReads<Fields>) require_unique_names(entries);
}

// Compares all fields, including the source and how it travels.
bool equal(const ManifestEntry& a, const ManifestEntry& b);

// Whether it can be quantised; other tensors travel as they are.
bool can_be_quantised(DType dtype, const Shape& shape);

// The tensors that one rank registers, in its order. Layouts repeat, so each is stored once.
struct Manifest {
  std::vector<ManifestEntry> entries;

  // Checks everything: limits, dtypes, shapes, layouts bound to their shapes, unique names.
  static void fields(auto& f, auto& self) { entries_field(f, self.entries); }
  // Of the serialised form, as 16 bytes (XXH3-128).
  std::string hash() const;
  static std::string hash_of(std::span<const std::byte> serialised);
};

// How rank r > 0 differs from rank 0's manifest; empty if it does not.
struct ManifestDiff {
  std::vector<std::string> lacking;    // names of rank 0 that this rank does not register
  std::vector<ManifestEntry> entries;  // that rank 0 lacks, or that differ

  bool empty() const { return lacking.empty() && entries.empty(); }
  static ManifestDiff between(const Manifest& rank0, const Manifest& own);
  static void fields(auto& f, auto& self) {
    f("lacking", self.lacking, kMaxTensors, kMaxNameBytes);
    entries_field(f, self.entries);
  }
};

}  // namespace tessera::bus
