#include "bus/registration/manifest.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <map>
#include <unordered_map>
#include <unordered_set>

#include "base/fail.h"
#include "bus/registration/layout_table.h"

namespace tessera::bus {
namespace {

// In the byte of a WireAsked.
constexpr int kRowPlane = 16;
constexpr int kColumnPlane = 32;
constexpr int kFused = 64;
constexpr int kPlaced = 128;
constexpr Index kMaxPlace = Index{1} << 31;                       // so that keys of amaxes can number blocks
constexpr size_t kLeastEntry = 4 + 1 + 1 + 4 + kLeastSource + 1;  // bytes

void write_entries(std::span<const ManifestEntry> entries, ByteWriter& out) {
  LayoutTableWriter layouts;
  std::vector<uint32_t> layout_of;
  for (const ManifestEntry& entry : entries) layout_of.push_back(layouts.add(entry.layout));
  layouts.write(out);
  out.put(static_cast<uint32_t>(entries.size()));
  for (size_t i = 0; i < entries.size(); ++i) {
    out.put_string(entries[i].name);
    out.put(entries[i].dtype);
    out.put(static_cast<uint8_t>(entries[i].shape.size()));
    for (const Index size : entries[i].shape) out.put(size);
    out.put(layout_of[i]);
    write_source(entries[i].source, out);
    write_wire({entries[i].wire, entries[i].planes, entries[i].fused}, out);
  }
}

ManifestEntry read_entry(ByteReader& in, LayoutTable& layouts) {
  ManifestEntry entry;
  entry.name = in.get_string(kMaxNameBytes);
  entry.dtype = in.get_enum(kLastDType);
  const auto dims = in.get<uint8_t>();
  if (dims > kMaxDims)
    fail(ErrorCode::kInvalidArgument, "manifest: tensor {} has {} dims, at most {} are known", entry.name, dims,
         kMaxDims);
  for (int d = 0; d < dims; ++d) entry.shape.push_back(in.get<Index>());
  element_count(entry.shape);
  entry.layout = layouts.take(in.get<uint32_t>(), entry.name).bind(entry.shape);
  entry.source = read_source(in, entry.name);
  WireAsked wire = read_wire(in, entry.name);
  entry.wire = wire.format;
  entry.planes = wire.planes;
  entry.fused = std::move(wire.fused);
  return entry;
}

std::vector<ManifestEntry> read_entries(ByteReader& in) {
  LayoutTable layouts = LayoutTable::read(in, "manifest");
  std::vector<ManifestEntry> entries;
  std::unordered_set<std::string> names;
  for (uint32_t count = in.get_count(kMaxTensors, kLeastEntry); count > 0; --count) {
    entries.push_back(read_entry(in, layouts));
    if (!names.insert(entries.back().name).second)
      fail(ErrorCode::kInvalidArgument, "manifest: tensor {} occurs twice", entries.back().name);
  }
  return entries;
}

}  // namespace

void write_source(const TensorSource& source, ByteWriter& out) {
  out.put_string(source.name);
  out.put(static_cast<uint8_t>(source.slices.size()));
  for (const Slice& slice : source.slices) {
    out.put(slice.begin);
    out.put(slice.end);
    out.put(slice.step);
    out.put(static_cast<uint8_t>(slice.dropped));
  }
}

TensorSource read_source(ByteReader& in, std::string_view tensor) {
  TensorSource source{.name = in.get_string(kMaxNameBytes), .slices = {}};
  const auto dims = in.get<uint8_t>();
  if (dims > kMaxDims)
    fail(ErrorCode::kInvalidArgument, "tensor {}: a slice of {} dims, at most {} are known", tensor, dims, kMaxDims);
  for (int dim = 0; dim < dims; ++dim) {
    Slice slice{.begin = in.get<Index>(), .end = in.get<Index>(), .step = in.get<Index>()};
    slice.dropped = in.get_bool();
    source.slices.push_back(slice);
  }
  return source;
}

void write_wire(const WireAsked& wire, ByteWriter& out) {
  const int format = wire.format ? static_cast<int>(*wire.format) + 1 : 0;
  const bool fused = !wire.fused.name.empty();
  const bool placed = fused && wire.fused.place;
  out.put(static_cast<uint8_t>(format | (wire.planes.row ? kRowPlane : 0) | (wire.planes.column ? kColumnPlane : 0) |
                               (fused ? kFused : 0) | (placed ? kPlaced : 0)));
  if (fused) out.put_string(wire.fused.name);
  if (!placed) return;
  out.put(wire.fused.place->row);
  out.put(wire.fused.place->column);
}

WireAsked read_wire(ByteReader& in, std::string_view tensor) {
  const auto byte = in.get<uint8_t>();
  WireAsked wire{.planes = {.row = (byte & kRowPlane) != 0, .column = (byte & kColumnPlane) != 0}};
  const int format = byte & ~(kRowPlane | kColumnPlane | kFused | kPlaced);
  if (format > static_cast<int>(all_formats().size()) || (format == 0 && !wire.planes.empty()) ||
      (byte & (kFused | kPlaced)) == kPlaced)
    fail(ErrorCode::kInvalidArgument, "tensor {}: unknown wire format {}", tensor, byte);
  if (format != 0) wire.format = static_cast<Format>(format - 1);
  if ((byte & kFused) != 0) wire.fused.name = in.get_string(kMaxNameBytes);
  if ((byte & kPlaced) == 0) return wire;
  const auto row = in.get<Index>();
  const auto column = in.get<Index>();
  if (std::min(row, column) < 0 || std::max(row, column) > kMaxPlace)
    fail(ErrorCode::kInvalidArgument, "tensor {}: a part of a fused matrix at [{}, {}]", tensor, row, column);
  wire.fused.place = {row, column};
  return wire;
}

bool equal(const ManifestEntry& a, const ManifestEntry& b) {
  return a.dtype == b.dtype && a.shape == b.shape && a.layout == b.layout && a.source == b.source && a.wire == b.wire &&
         a.planes == b.planes && a.fused == b.fused;
}

bool can_be_quantised(DType dtype, const Shape& shape) {
  return shape.size() >= 2 && is_castable_float(dtype);
}

void Manifest::write(ByteWriter& out) const {
  write_entries(entries, out);
}

Manifest Manifest::read(ByteReader& in) {
  return Manifest{read_entries(in)};
}

std::string Manifest::hash() const {
  ByteWriter out;
  write(out);
  const XXH128_hash_t hash = XXH3_128bits(out.view().data(), out.size());
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, hash);
  return std::string(reinterpret_cast<const char*>(canonical.digest), sizeof(canonical.digest));
}

ManifestDiff ManifestDiff::between(const Manifest& rank0, const Manifest& own) {
  ManifestDiff diff;
  std::unordered_map<std::string_view, const ManifestEntry*> mine, theirs;
  for (const ManifestEntry& entry : own.entries) mine.emplace(entry.name, &entry);
  for (const ManifestEntry& entry : rank0.entries) {
    theirs.emplace(entry.name, &entry);
    if (!mine.contains(entry.name)) diff.lacking.push_back(entry.name);
  }
  for (const ManifestEntry& entry : own.entries) {
    const auto it = theirs.find(entry.name);
    if (it == theirs.end() || !equal(*it->second, entry)) diff.entries.push_back(entry);
  }
  return diff;
}

void ManifestDiff::write(ByteWriter& out) const {
  out.put(static_cast<uint32_t>(lacking.size()));
  for (const std::string& name : lacking) out.put_string(name);
  write_entries(entries, out);
}

ManifestDiff ManifestDiff::read(ByteReader& in) {
  ManifestDiff diff;
  for (uint32_t count = in.get_count(kMaxTensors, 4); count > 0; --count)
    diff.lacking.push_back(in.get_string(kMaxNameBytes));
  diff.entries = read_entries(in);
  return diff;
}

}  // namespace tessera::bus
