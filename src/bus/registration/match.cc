#include "bus/registration/match.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "base/fail.h"
#include "base/nearest.h"
#include "bus/registration/name_table.h"
#include "bus/registration/rename.h"

namespace tessera::bus {
namespace {

constexpr size_t kMaxFindings = 20;
constexpr size_t kMaxGuesses = 5;  // most errors for which similar names are searched

const std::string& source_of(const ManifestEntry& entry) {
  return entry.source.name.empty() ? entry.name : entry.source.name;
}

// The source that fills it: "model.embed", "experts [3, 0:64]".
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

// Collects every disagreement of a registration, to report all at once.
class Findings {
 public:
  template <typename... Args>
  void add(fmt::format_string<Args...> format, Args&&... args) {
    if (++count_ <= kMaxFindings) lines_.push_back(fmt::format(format, std::forward<Args>(args)...));
  }
  // Follows all findings.
  void advise(std::string advice) { advice_ = std::move(advice); }
  void throw_if_any(std::string_view what) const {
    if (count_ == 0) return;
    const std::string more = count_ > kMaxFindings ? fmt::format("; and {} more", count_ - kMaxFindings) : "";
    fail(ErrorCode::kMismatch, "{}: {}{}{}{}"_message, what, fmt::join(lines_, "; "), more, advice_.empty() ? "" : "; ",
         advice_);
  }

 private:
  std::string advice_;
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

// The disjoint meshes under which a name is registered, as one entry; findings for whatever disagrees.
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
      findings.add("tensor {}: {}/{} has planes of it: {}, {}/{}: {}", first.name, job, rank,
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

// What `taken` takes of the offered tensor: all, or the slice that it names.
Match::Tensor source_tensor(const ManifestEntry& offered, const ManifestEntry& taken) {
  Match::Tensor tensor{.name = taken.name,
                       .source = offered.name,
                       .shape = offered.shape,
                       .src_dtype = offered.dtype,
                       .dst_dtype = taken.dtype,
                       .src = offered.layout,
                       .dst = taken.layout};
  tensor.encoded = !offered.planes.empty();
  if (tensor.encoded) tensor.src_dtype = DType::kF32;  // what it stands for
  const std::vector<Slice>& slices = taken.source.slices;
  if (slices.empty()) return tensor;
  if (tensor.encoded)
    fail(ErrorCode::kUnimplemented, "a slice of what is quantised to {} already"_message, to_string(offered.wire));
  if (bits_of(offered.dtype) < 8)
    fail(ErrorCode::kUnimplemented, "a slice of {}, whose elements share bytes"_message, to_string(offered.dtype));
  tensor.of = {.shape = offered.shape, .layout = offered.layout, .slices = slices};
  tensor.shape = sliced_shape(offered.shape, slices);
  tensor.src = sliced_layout(offered.layout, offered.shape, slices).bind(tensor.shape);
  return tensor;
}

// The format that one side or the other asks for, if what is taken can be quantised.
std::optional<Format> agreed_wire(const ManifestEntry& offered, const std::string& sender_job,
                                  const ManifestEntry& taken, const std::string& receiver_job,
                                  const Match::Tensor& tensor, Findings& findings) {
  if (!can_be_quantised(tensor.src_dtype, tensor.shape)) return std::nullopt;
  const bool differ = offered.wire && taken.wire && *offered.wire != *taken.wire;
  if (differ && tensor.encoded)
    findings.add(
        "tensor {}: {} offers it quantised to {} already, and {} asks for {}: ask for what is offered, or offer the "
        "tensor that it was made from",
        taken.name, sender_job, to_string(offered.wire), receiver_job, to_string(taken.wire));
  else if (differ)
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

// Findings for planes that are to travel as they are and that the sender does not have.
void require_offered_planes(const ManifestEntry& offered, const std::string& sender_job, const ManifestEntry& taken,
                            const std::string& receiver_job, Findings& findings) {
  if (column_is_transposed_row({.format = *offered.wire})) return;  // either plane tells the other
  const bool row = taken.planes.empty() || taken.planes.row;
  if ((!row || offered.planes.row) && (!taken.planes.column || offered.planes.column)) return;
  findings.add(
      "tensor {}: {} takes {} of it, and {} offers its {} plane only, quantised to {} already: offer both planes, "
      "or the tensor that they were made from",
      taken.name, receiver_job,
      taken.planes.empty() ? "the values of the row plane"
                           : fmt::format("the {} plane", tessera::to_string(taken.planes)),
      sender_job, tessera::to_string(offered.planes), to_string(offered.wire));
}

// Adds what has to travel for the planes.
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
    return findings.add("tensor {}: {} of {} cannot be taken: {}; it may offer that as a separate tensor", taken.name,
                        to_string(taken), sender_job, error.what());
  }
  const std::string from = taken.source == TensorSource{} ? "" : fmt::format("{} of ", to_string(taken));
  if (tensor.shape != taken.shape)
    findings.add("tensor {}: shape {} in {}{}, {} in {}", taken.name, to_string_shape(tensor.shape), from, sender_job,
                 to_string_shape(taken.shape), receiver_job);
  if (taken.planes.empty() && tensor.src_dtype != taken.dtype &&
      !(is_castable_float(tensor.src_dtype) && is_castable_float(taken.dtype)))
    findings.add("tensor {}: dtype {} in {}{} cannot be cast to {} in {} (f64, f32, f16 and bf16 can)", taken.name,
                 to_string(tensor.src_dtype), from, sender_job, to_string(taken.dtype), receiver_job);
  if (taken.layout.has_partial())
    findings.add(
        "tensor {}: {} asks for layout {}: a Partial destination cannot be filled from another job, because "
        "nothing says how its terms should be split; take R or S and reduce there",
        taken.name, receiver_job, taken.layout.to_string());
  tensor.wire = agreed_wire(offered, sender_job, taken, receiver_job, tensor, findings);
  if (!tensor.encoded)
    tensor.fused = taken.fused.place;
  else if (tensor.wire)
    require_offered_planes(offered, sender_job, taken, receiver_job, findings);
  else
    findings.add("tensor {}: {} offers planes of it, and shape {} is not that of a matrix", offered.name, sender_job,
                 to_string_shape(tensor.shape));
  if (taken.planes.empty()) return matched.tensors.push_back(std::move(tensor));
  if (!tensor.wire)
    return findings.add(
        "tensor {}: {} takes it quantised to {}, and {} offers {} of shape {}: f64, f32, f16 and bf16 of two dims or "
        "more are quantised",
        taken.name, receiver_job, to_string(taken.wire), sender_job, to_string(offered.dtype),
        to_string_shape(tensor.shape));
  add_planes(std::move(tensor), taken.planes, matched);
}

// Whether every tensor's layout has only ranks of a job of `world` ranks.
bool lies_within(const Manifest& manifest, Rank world) {
  std::unordered_set<Layout, LayoutHash> seen;
  return std::ranges::all_of(manifest.entries, [&](const ManifestEntry& entry) {
    return !seen.insert(entry.layout).second ||
           std::ranges::all_of(entry.layout.mesh().ranks(), [&](Rank rank) { return rank < world; });
  });
}

// The entries of a receiver, by their sources.
class Takers {
 public:
  explicit Takers(const Manifest& receiver) : sources_(receiver.entries.size()), next_(receiver.entries.size(), kNone) {
    for (uint32_t i = static_cast<uint32_t>(next_.size()); i-- > 0;) {
      const uint32_t source = sources_.add(source_of(receiver.entries[i]));
      if (source == first_.size()) first_.push_back(kNone);
      next_[i] = std::exchange(first_[source], i);
    }
  }

  // Calls `visit` with each entry that `source` fills, in order; returns whether there are any.
  template <typename Visit>  // void(uint32_t entry)
  bool of(std::string_view source, Visit visit) const {
    const std::optional<uint32_t> number = sources_.find(source);
    if (!number) return false;
    for (uint32_t entry = first_[*number]; entry != kNone; entry = next_[entry]) visit(entry);
    return true;
  }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  NameTable sources_;
  std::vector<uint32_t> first_;  // by source: its first entry
  std::vector<uint32_t> next_;   // by entry: the next one of the same source
};

// An entry with an explicit source costs time and memory for each rank that holds the source: a few bytes from a peer
// must not become many.
void require_few_ranks(const Manifest& sender, const Manifest& receiver, const Takers& takers,
                       const std::string& receiver_job) {
  int64_t ranks = 0;
  for (const ManifestEntry& offered : sender.entries) {
    takers.of(offered.name, [&](uint32_t taken) {
      if (receiver.entries[taken].source != TensorSource{}) ranks += offered.layout.mesh().size();
    });
    if (ranks > kMaxSourceRanks)
      fail(ErrorCode::kMismatch,
           "tensor {}: sources that {} names are of meshes of more than {} ranks together"_message, offered.name,
           receiver_job, kMaxSourceRanks);
  }
}

// Parts of one tensor are quantised together, unless they are quantised already.
void find_groups(const Manifest& receiver, Match& matched, Findings& findings) {
  NameTable parts(0), wholes(0);
  std::vector<uint32_t> whole_of;  // by part
  for (const ManifestEntry& entry : receiver.entries)
    if (!entry.fused.name.empty()) {
      parts.add(entry.name);
      whole_of.push_back(wholes.add(entry.fused.name));
    }
  std::vector<std::optional<uint32_t>> first_of(wholes.size());
  for (uint32_t t = 0; t < matched.tensors.size(); ++t) {
    Match::Tensor& tensor = matched.tensors[t];
    tensor.group = t;
    if (!tensor.wire || tensor.encoded || parts.size() == 0) continue;
    const std::optional<uint32_t> part = parts.find(tensor.name);
    if (!part) continue;
    const uint32_t whole = whole_of[*part];
    if (!first_of[whole]) first_of[whole] = t;
    tensor.group = *first_of[whole];
    const Match::Tensor& first = matched.tensors[tensor.group];
    const auto stack = [](const Match::Tensor& of) { return std::span(of.shape).first(of.shape.size() - 2); };
    if (!std::ranges::equal(stack(tensor), stack(first)) || tensor.src_dtype != first.src_dtype ||
        tensor.wire != first.wire || tensor.fused.has_value() != first.fused.has_value())
      findings.add(
          "tensors {} and {} are parts of {} and would be quantised as one: {} {} to {}, {} {} to {}: parts have one "
          "dtype, one wire format and the same dims before the last two",
          first.name, tensor.name, wholes.name(whole), to_string_shape(first.shape), to_string(first.src_dtype),
          to_string(first.wire), to_string_shape(tensor.shape), to_string(tensor.src_dtype), to_string(tensor.wire));
  }
}

// Findings for names without an offer, with similar names, and a map of names if one helps.
void add_unoffered(const Manifest& sender, const std::string& sender_job, const Manifest& receiver,
                   const std::string& receiver_job, const std::vector<bool>& filled, Findings& findings) {
  std::vector<std::string_view> offered;
  size_t guesses = 0;
  for (size_t i = 0; i < filled.size(); ++i) {
    if (filled[i]) continue;
    if (offered.empty())
      for (const ManifestEntry& entry : sender.entries) offered.push_back(entry.name);
    const ManifestEntry& entry = receiver.entries[i];
    const std::string& source = source_of(entry);
    findings.add("tensor {}: {} does not offer {}{}", entry.name, sender_job, source == entry.name ? "it" : source,
                 ++guesses <= kMaxGuesses ? did_you_mean(source, offered) : "");
  }
  findings.advise(suggest_map({sender, sender_job}, {receiver, receiver_job}, filled));
}

}  // namespace

std::shared_ptr<const Manifest> merge(const std::string& job, const std::shared_ptr<const Manifest>& rank0,
                                      std::span<const ManifestDiff> diffs) {
  const auto world = static_cast<Rank>(diffs.size());
  if (std::ranges::all_of(diffs, &ManifestDiff::empty) && lies_within(*rank0, world)) return rank0;
  Findings findings;
  NameTable names(rank0->entries.size());
  std::vector<Claims> by_name;  // likewise, by the name's number
  std::vector<std::vector<Rank>> lacking(rank0->entries.size());
  const auto claim = [&](Rank rank, const ManifestEntry& entry) {
    const uint32_t number = names.add(entry.name);
    if (number == by_name.size()) by_name.emplace_back();
    by_name[number].claims.push_back({rank, &entry});
  };
  for (const ManifestEntry& entry : rank0->entries) claim(0, entry);
  for (Rank rank = 1; rank < world; ++rank) {
    const ManifestDiff& diff = diffs[static_cast<size_t>(rank)];
    for (const std::string& name : diff.lacking)
      if (const auto number = names.find(name); number && *number < lacking.size()) lacking[*number].push_back(rank);
    for (const ManifestEntry& entry : diff.entries) claim(rank, entry);
  }

  auto merged = std::make_shared<Manifest>();
  merged->entries.reserve(names.size());
  for (uint32_t number = 0; number < names.size(); ++number) {
    const Claims& claims = by_name[number];
    ManifestEntry entry = merge_claims(job, claims, findings);
    const Rank first = claims.claims.front().rank;
    for (const Rank rank : entry.layout.mesh().ranks()) {
      if (rank >= world) {
        findings.add("tensor {}: {}/{} lays it out over rank {}, but the job has {}", entry.name, job, first, rank,
                     world);
        break;
      }
      // Every rank registers rank 0's names unless it says otherwise; other names, only the ranks that say so.
      const bool claimed = std::ranges::binary_search(claims.claims, rank, {}, &Claims::Claim::rank);
      const bool lacks = first == 0 && std::ranges::binary_search(lacking[number], rank);
      if (first == 0 ? lacks && !claimed : !claimed)
        findings.add("tensor {}: {}/{} is in its mesh ({}) but does not register it", entry.name, job, rank,
                     entry.layout.to_string());
    }
    merged->entries.push_back(std::move(entry));
  }
  findings.throw_if_any(fmt::format("the ranks of job {} disagree"_message, job));
  return merged;
}

Match match(const Manifest& sender, const std::string& sender_job, const Manifest& receiver,
            const std::string& receiver_job) {
  Findings findings;
  Match matched;
  const Takers takers(receiver);
  require_few_ranks(sender, receiver, takers, receiver_job);
  matched.tensors.reserve(receiver.entries.size());
  std::vector<bool> filled(receiver.entries.size());
  for (const ManifestEntry& offered : sender.entries) {
    if (offered.source != TensorSource{})
      findings.add("tensor {}: {} offers it and says that {} fills it; only a receiver may name a source", offered.name,
                   sender_job, to_string(offered));
    const bool taken = takers.of(offered.name, [&](uint32_t entry) {
      filled[entry] = true;
      match_one(offered, sender_job, receiver.entries[entry], receiver_job, matched, findings);
    });
    if (!taken) ++matched.skipped;
  }
  find_groups(receiver, matched, findings);
  add_unoffered(sender, sender_job, receiver, receiver_job, filled, findings);
  findings.throw_if_any(fmt::format("jobs {} and {} do not match"_message, sender_job, receiver_job));
  return matched;
}

}  // namespace tessera::bus
