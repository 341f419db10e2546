#include "bus/registration/manifest.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/fail.h"
#include "bus/registration/name_table.h"

namespace tessera::bus {

WireByte::WireByte(std::optional<Format> format, PlaneSet planes, const FusedPart& fused) {
  const bool is_part = !fused.name.empty();
  byte_ = static_cast<uint8_t>((format ? static_cast<int>(*format) + 1 : 0) | (planes.row ? kRowPlane : 0) |
                               (planes.column ? kColumnPlane : 0) | (is_part ? kFused : 0) |
                               (is_part && fused.place ? kPlaced : 0));
}

bool WireByte::is_known() const {
  if (format() > all_formats().size() || (has(kPlaced) && !has(kFused))) return false;
  return format() != 0 || !(has(kRowPlane) || has(kColumnPlane));
}

void WireByte::fill(std::optional<Format>& format, PlaneSet& planes, FusedPart& fused) const {
  format.reset();
  if (this->format() != 0) format = static_cast<Format>(this->format() - 1);
  planes = {.row = has(kRowPlane), .column = has(kColumnPlane)};
  fused = {};
  if (has(kPlaced)) fused.place = FusedPart::Place{};
}

void require_unique_names(std::span<const ManifestEntry> entries) {
  NameTable names(entries.size());
  for (size_t i = 0; i < entries.size(); ++i)
    if (names.add(entries[i].name) != i)
      fail(ErrorCode::kInvalidArgument, "manifest: tensor {} occurs twice"_message, entries[i].name);
}

bool equal(const ManifestEntry& a, const ManifestEntry& b) {
  return a.dtype == b.dtype && a.shape == b.shape && a.layout == b.layout && a.source == b.source && a.wire == b.wire &&
         a.planes == b.planes && a.fused == b.fused;
}

bool can_be_quantised(DType dtype, const Shape& shape) {
  return shape.size() >= 2 && is_castable_float(dtype);
}

std::string Manifest::hash() const {
  return hash_of(message_bytes(*this));
}

std::string Manifest::hash_of(std::span<const std::byte> bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, hash);
  return std::string(reinterpret_cast<const char*>(canonical.digest), sizeof(canonical.digest));
}

ManifestDiff ManifestDiff::between(const Manifest& rank0, const Manifest& own) {
  ManifestDiff diff;
  NameTable mine(own.entries.size()), theirs(rank0.entries.size());  // numbers are positions in the manifests
  for (const ManifestEntry& entry : own.entries) mine.add(entry.name);
  for (const ManifestEntry& entry : rank0.entries) {
    theirs.add(entry.name);
    if (!mine.find(entry.name)) diff.lacking.push_back(entry.name);
  }
  for (const ManifestEntry& entry : own.entries) {
    const std::optional<uint32_t> there = theirs.find(entry.name);
    if (!there || !equal(rank0.entries[*there], entry)) diff.entries.push_back(entry);
  }
  return diff;
}

}  // namespace tessera::bus
