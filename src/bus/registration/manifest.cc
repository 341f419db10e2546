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

constexpr size_t kMaxFindings = 20;
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

bool equal(const ManifestEntry& a, const ManifestEntry& b) {
  return a.dtype == b.dtype && a.shape == b.shape && a.layout == b.layout && a.source == b.source && a.wire == b.wire &&
         a.planes == b.planes && a.fused == b.fused;
}

const std::string& source_of(const ManifestEntry& entry) {
  return entry.source.name.empty() ? entry.name : entry.source.name;
}

// What fills it: "model.embed", "experts [3, 0:64]".
std::string to_string(const ManifestEntry& entry) {
  const std::vector<Slice>& slices = entry.source.slices;
  return slices.empty() ? source_of(entry)
                        : fmt::format("{} [{}]", source_of(entry), tessera::to_string(std::span(slices)));
}

std::string_view to_string(std::optional<Format> wire) {
  return wire ? tessera::to_string(*wire) : "none";
}

// "a part of qkv at [64, 0]".
std::string to_string(const FusedPart& part) {
  if (part.name.empty()) return "a part of nothing fused";
  const std::string at = part.place ? fmt::format(" at [{}, {}]", part.place->row, part.place->column) : "";
  return fmt::format("a part of {}{}", part.name, at);
}

bool disjoint(const Mesh& a, const Mesh& b) {
  return std::none_of(b.ranks().begin(), b.ranks().end(), [&](Rank rank) { return a.position_of(rank).has_value(); });
}

// Every disagreement of a registration, reported at once.
class Findings {
 public:
  template <typename... Args>
  void add(fmt::format_string<Args...> format, Args&&... args) {
    if (++count_ <= kMaxFindings) lines_.push_back(fmt::format(format, std::forward<Args>(args)...));
  }
  void throw_if_any(std::string_view what) const {
    if (count_ == 0) return;
    const std::string more = count_ > kMaxFindings ? fmt::format("; and {} more", count_ - kMaxFindings) : "";
    fail(ErrorCode::kMismatch, "{}: {}{}", what, fmt::join(lines_, "; "), more);
  }

 private:
  size_t count_ = 0;
  std::vector<std::string> lines_;
};

// One name as the ranks of a side register it.
struct Claims {
  struct Claim {
    Rank rank;
    const ManifestEntry* entry;
  };
  std::vector<Claim> claims;  // ascending by rank
};

// The disjoint meshes under which a name is registered, as one entry; findings for whatever does not agree.
ManifestEntry merge_claims(const std::string& job, const Claims& claims, Findings& findings) {
  const ManifestEntry& first = *claims.claims.front().entry;
  const Rank first_rank = claims.claims.front().rank;
  std::vector<const ManifestEntry*> meshes;  // distinct entries, in order of their lowest rank
  for (const auto& [rank, entry] : claims.claims) {
    const auto same = [&](const ManifestEntry* other) { return equal(*other, *entry); };
    if (std::any_of(meshes.begin(), meshes.end(), same)) continue;
    if (entry->dtype != first.dtype) {
      findings.add("tensor {}: {}/{} has dtype {}, {}/{} has {}", first.name, job, rank, to_string(entry->dtype), job,
                   first_rank, to_string(first.dtype));
    } else if (entry->shape != first.shape) {
      findings.add("tensor {}: {}/{} has shape {}, {}/{} has {}", first.name, job, rank, to_string_shape(entry->shape),
                   job, first_rank, to_string_shape(first.shape));
    } else if (entry->source != first.source) {
      findings.add("tensor {}: {}/{} fills it with {}, {}/{} with {}", first.name, job, rank, to_string(*entry), job,
                   first_rank, to_string(first));
    } else if (entry->wire != first.wire) {
      findings.add("tensor {}: {}/{} asks for wire format {}, {}/{} for {}", first.name, job, rank,
                   to_string(entry->wire), job, first_rank, to_string(first.wire));
    } else if (entry->planes != first.planes) {
      findings.add("tensor {}: {}/{} takes planes of it: {}, {}/{}: {}", first.name, job, rank,
                   tessera::to_string(entry->planes), job, first_rank, tessera::to_string(first.planes));
    } else if (entry->fused != first.fused) {
      findings.add("tensor {}: {}/{} has it as {}, {}/{} as {}", first.name, job, rank, to_string(entry->fused), job,
                   first_rank, to_string(first.fused));
    } else {
      const bool replica = std::ranges::equal(entry->layout.placements(), first.layout.placements()) &&
                           std::ranges::equal(entry->layout.mesh().axes(), first.layout.mesh().axes()) &&
                           std::all_of(meshes.begin(), meshes.end(), [&](const ManifestEntry* other) {
                             return disjoint(other->layout.mesh(), entry->layout.mesh());
                           });
      if (replica)
        meshes.push_back(entry);
      else
        findings.add("tensor {}: {}/{} has layout {}, {}/{} has {}", first.name, job, rank, entry->layout.to_string(),
                     job, first_rank, first.layout.to_string());
    }
  }
  ManifestEntry merged = first;
  if (meshes.size() > 1) {
    std::vector<Axis> axes{{"replica", static_cast<int>(meshes.size())}};
    std::vector<Rank> ranks;
    std::vector<Placement> placements{Replicate{}};
    axes.insert(axes.end(), first.layout.mesh().axes().begin(), first.layout.mesh().axes().end());
    placements.insert(placements.end(), first.layout.placements().begin(), first.layout.placements().end());
    for (const ManifestEntry* entry : meshes)
      ranks.insert(ranks.end(), entry->layout.mesh().ranks().begin(), entry->layout.mesh().ranks().end());
    merged.layout = Layout(Mesh(std::move(axes), std::move(ranks)), std::move(placements));
  }
  return merged;
}

// What `taken` takes of what is offered: all, or the slice that it says.
Match::Tensor source_tensor(const ManifestEntry& offered, const ManifestEntry& taken) {
  Match::Tensor tensor{.name = taken.name,
                       .source = offered.name,
                       .shape = offered.shape,
                       .src_dtype = offered.dtype,
                       .dst_dtype = taken.dtype,
                       .src = offered.layout,
                       .dst = taken.layout};
  const std::vector<Slice>& slices = taken.source.slices;
  if (slices.empty()) return tensor;
  if (bits_of(offered.dtype) < 8)
    fail(ErrorCode::kUnimplemented, "a slice of {}, whose elements share bytes", to_string(offered.dtype));
  tensor.of = {.shape = offered.shape, .layout = offered.layout, .slices = slices};
  tensor.shape = sliced_shape(offered.shape, slices);
  tensor.src = sliced_layout(offered.layout, offered.shape, slices).bind(tensor.shape);
  return tensor;
}

// What one side or the other asks for, where what is taken can be quantised.
std::optional<Format> agreed_wire(const ManifestEntry& offered, const std::string& sender_job,
                                  const ManifestEntry& taken, const std::string& receiver_job,
                                  const Match::Tensor& tensor, Findings& findings) {
  if (!can_be_quantised(tensor.src_dtype, tensor.shape)) return std::nullopt;
  if (offered.wire && taken.wire && *offered.wire != *taken.wire)
    findings.add("tensor {}: {} asks for wire format {}, {} for {}", taken.name, sender_job, to_string(offered.wire),
                 receiver_job, to_string(taken.wire));
  const std::optional<Format> wire = offered.wire ? offered.wire : taken.wire;
  if (wire == Format::kNvfp4 && tensor.shape.back() % 2 != 0)
    findings.add(
        "tensor {}: dim {} of shape {} is odd, and nvfp4 packs two of its elements a byte: ask for another wire format "
        "for it, mxfp8 for example, or for none",
        taken.name, tensor.shape.size() - 1, to_string_shape(tensor.shape));
  return wire;
}

// What has to travel for the planes.
void add_planes(Match::Tensor tensor, PlaneSet planes, Match& matched) {
  if (column_is_transposed_row({.format = *tensor.wire})) {
    tensor.planes = planes;
    return matched.tensors.push_back(std::move(tensor));
  }
  if (planes.row) {
    tensor.planes = {.row = true};
    matched.tensors.push_back(tensor);
  }
  if (!planes.column) return;
  const int last = static_cast<int>(tensor.shape.size()) - 1;
  tensor.planes = {.column = true};
  tensor.transposed = true;
  std::swap(tensor.shape[tensor.shape.size() - 2], tensor.shape.back());
  tensor.src = tensor.src.transposed(last - 1, last);
  tensor.dst = tensor.dst.transposed(last - 1, last);
  matched.tensors.push_back(std::move(tensor));
}

void match_one(const ManifestEntry& offered, const std::string& sender_job, const ManifestEntry& taken,
               const std::string& receiver_job, Match& matched, Findings& findings) {
  Match::Tensor tensor;
  try {
    tensor = source_tensor(offered, taken);
  } catch (const Error& error) {
    return findings.add("tensor {}: {} of {} cannot be taken: {}; it may offer that as a tensor of its own", taken.name,
                        to_string(taken), sender_job, error.what());
  }
  const std::string from = taken.source == TensorSource{} ? "" : fmt::format("{} of ", to_string(taken));
  if (tensor.shape != taken.shape)
    findings.add("tensor {}: shape {} in {}{}, {} in {}", taken.name, to_string_shape(tensor.shape), from, sender_job,
                 to_string_shape(taken.shape), receiver_job);
  if (taken.planes.empty() && offered.dtype != taken.dtype &&
      !(is_castable_float(offered.dtype) && is_castable_float(taken.dtype)))
    findings.add("tensor {}: dtype {} in {}{} cannot be cast to {} in {} (f64, f32, f16 and bf16 can)", taken.name,
                 to_string(offered.dtype), from, sender_job, to_string(taken.dtype), receiver_job);
  if (taken.layout.has_partial())
    findings.add(
        "tensor {}: {} asks for layout {}: a Partial destination cannot be filled from another job, because "
        "nothing says how its terms should be split; take R or S and reduce there",
        taken.name, receiver_job, taken.layout.to_string());
  tensor.wire = agreed_wire(offered, sender_job, taken, receiver_job, tensor, findings);
  tensor.fused = taken.fused.place;
  if (!offered.planes.empty())
    findings.add("tensor {}: {} offers planes of it, which can be received alone", offered.name, sender_job);
  if (taken.planes.empty()) return matched.tensors.push_back(std::move(tensor));
  if (!tensor.wire)
    return findings.add(
        "tensor {}: {} takes it quantised to {}, and {} offers {} of shape {}: f64, f32, f16 and bf16 of two dims or "
        "more are quantised",
        taken.name, receiver_job, to_string(taken.wire), sender_job, to_string(offered.dtype),
        to_string_shape(tensor.shape));
  add_planes(std::move(tensor), taken.planes, matched);
}

using Takers = std::unordered_map<std::string_view, std::vector<const ManifestEntry*>>;  // by source

// What has a source of its own costs time and memory for each rank that holds that: a few bytes of a peer's do not
// become many.
void require_few_ranks(const Manifest& sender, const Takers& wanted, const std::string& receiver_job) {
  int64_t ranks = 0;
  for (const ManifestEntry& offered : sender.entries) {
    const auto it = wanted.find(offered.name);
    if (it == wanted.end()) continue;
    const auto takers =
        std::ranges::count_if(it->second, [](const ManifestEntry* taken) { return taken->source != TensorSource{}; });
    ranks += takers * offered.layout.mesh().size();
    if (ranks > kMaxSourceRanks)
      fail(ErrorCode::kMismatch, "tensor {}: sources that {} names are of meshes of more than {} ranks together",
           offered.name, receiver_job, kMaxSourceRanks);
  }
}

// Parts of one tensor are quantised as one.
void find_groups(const Manifest& receiver, Match& matched, Findings& findings) {
  std::unordered_map<std::string_view, std::string_view> fused_of;  // by the part's name
  for (const ManifestEntry& entry : receiver.entries)
    if (!entry.fused.name.empty()) fused_of.emplace(entry.name, entry.fused.name);
  std::unordered_map<std::string_view, uint32_t> first_of;
  for (uint32_t t = 0; t < matched.tensors.size(); ++t) {
    Match::Tensor& tensor = matched.tensors[t];
    tensor.group = t;
    const auto fused = fused_of.find(tensor.name);
    if (!tensor.wire || fused == fused_of.end()) continue;
    tensor.group = first_of.emplace(fused->second, t).first->second;
    const Match::Tensor& first = matched.tensors[tensor.group];
    const auto stack = [](const Match::Tensor& of) { return std::span(of.shape).first(of.shape.size() - 2); };
    if (!std::ranges::equal(stack(tensor), stack(first)) || tensor.src_dtype != first.src_dtype ||
        tensor.wire != first.wire || tensor.fused.has_value() != first.fused.has_value())
      findings.add(
          "tensors {} and {} are parts of {} and would be quantised as one: {} {} to {}, {} {} to {}: parts have one "
          "dtype, one wire format and the same dims before the last two",
          first.name, tensor.name, fused->second, to_string_shape(first.shape), to_string(first.src_dtype),
          to_string(first.wire), to_string_shape(tensor.shape), to_string(tensor.src_dtype), to_string(tensor.wire));
  }
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

Manifest merge(const std::string& job, const Manifest& rank0, std::span<const ManifestDiff> diffs) {
  Findings findings;
  const auto world = static_cast<Rank>(diffs.size());
  std::vector<std::string_view> order;
  std::unordered_map<std::string_view, Claims> by_name;
  std::unordered_map<std::string_view, std::vector<Rank>> lacking;  // of rank 0's names
  for (const ManifestEntry& entry : rank0.entries) {
    order.push_back(entry.name);
    by_name[entry.name].claims.push_back({0, &entry});
  }
  for (Rank rank = 1; rank < world; ++rank) {
    for (const std::string& name : diffs[static_cast<size_t>(rank)].lacking) lacking[name].push_back(rank);
    for (const ManifestEntry& entry : diffs[static_cast<size_t>(rank)].entries) {
      Claims& claims = by_name[entry.name];
      if (claims.claims.empty()) order.push_back(entry.name);
      claims.claims.push_back({rank, &entry});
    }
  }

  Manifest merged;
  for (const std::string_view name : order) {
    const Claims& claims = by_name[name];
    ManifestEntry entry = merge_claims(job, claims, findings);
    const Rank first = claims.claims.front().rank;
    for (const Rank rank : entry.layout.mesh().ranks()) {
      if (rank >= world) {
        findings.add("tensor {}: {}/{} lays it out over rank {}, but the job has {}", name, job, first, rank, world);
        break;
      }
      // Rank 0's names are registered by every rank that does not say otherwise; other names only by those that say so.
      const auto of_rank = [&](const Claims::Claim& claim) { return claim.rank == rank; };
      const bool claimed = std::ranges::any_of(claims.claims, of_rank);
      const auto it = lacking.find(name);
      const bool lacks = it != lacking.end() && std::ranges::binary_search(it->second, rank);
      if (first == 0 ? lacks && !claimed : !claimed)
        findings.add("tensor {}: {}/{} is in its mesh ({}) but does not register it", name, job, rank,
                     entry.layout.to_string());
    }
    merged.entries.push_back(std::move(entry));
  }
  findings.throw_if_any(fmt::format("the ranks of job {} disagree", job));
  return merged;
}

Match match(const Manifest& sender, const std::string& sender_job, const Manifest& receiver,
            const std::string& receiver_job) {
  Findings findings;
  Match matched;
  Takers wanted;
  for (const ManifestEntry& entry : receiver.entries) wanted[source_of(entry)].push_back(&entry);
  require_few_ranks(sender, wanted, receiver_job);
  for (const ManifestEntry& offered : sender.entries) {
    if (offered.source != TensorSource{})
      findings.add("tensor {}: {} offers it and says that {} fills it; a source is for who receives it", offered.name,
                   sender_job, to_string(offered));
    const auto it = wanted.find(offered.name);
    if (it == wanted.end()) {
      ++matched.skipped;
      continue;
    }
    for (const ManifestEntry* taken : it->second)
      match_one(offered, sender_job, *taken, receiver_job, matched, findings);
    wanted.erase(it);
  }
  find_groups(receiver, matched, findings);
  for (const ManifestEntry& entry : receiver.entries)
    if (wanted.contains(source_of(entry)))
      findings.add("tensor {}: {} does not offer {}", entry.name, sender_job,
                   source_of(entry) == entry.name ? "it" : source_of(entry));
  findings.throw_if_any(fmt::format("jobs {} and {} do not match", sender_job, receiver_job));
  return matched;
}

}  // namespace tessera::bus
