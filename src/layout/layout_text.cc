// The text form of a layout: AXES@RANKS:PLACEMENTS, e.g. "dp=2,tp=4@0-7:R,S1".
#include <array>
#include <charconv>
#include <limits>

#include "base/fail.h"
#include "layout/text_reader.h"
#include "tessera/layout.h"

namespace tessera {
namespace {

constexpr std::string_view kPlacements =
    "a placement (R, S<dim>, S<dim>*<factor>, G<dim>[<bound>;...], Psum|Pavg|Pmin|Pmax|Pproduct)";

constexpr std::array kReduceOps{ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct};

std::vector<Axis> parse_axes(TextReader& reader) {
  std::vector<Axis> axes;
  do {
    if (axes.size() == kMaxAxes) reader.fail_expected(fmt::format("at most {} axes", kMaxAxes));
    Axis axis;
    axis.name = reader.name();
    if (!axis.name.empty()) reader.expect("=", "\"=\" and the size of the axis");
    axis.size = static_cast<int>(reader.number(
        1, kMaxRanks,
        fmt::format("{} of 1 to {}", axis.name.empty() ? "an axis (name=size or size)" : "a size", kMaxRanks)));
    axes.push_back(std::move(axis));
  } while (reader.accept(","));
  return axes;
}

std::vector<Rank> parse_ranks(TextReader& reader) {
  constexpr Index kHighest = std::numeric_limits<Rank>::max();
  std::vector<Rank> ranks;
  do {
    const size_t begin = reader.position();
    const Index first = reader.number(0, kHighest, fmt::format("a rank from 0 to {}", kHighest));
    Index last = first;
    if (reader.accept("-")) last = reader.number(first, kHighest, fmt::format("a rank from {} to {}", first, kHighest));
    if (last - first >= kMaxRanks - static_cast<Index>(ranks.size())) {
      reader.rewind(begin);
      reader.fail_expected(fmt::format("at most {} ranks in all", kMaxRanks));
    }
    for (Index rank = first; rank <= last; ++rank) ranks.push_back(static_cast<Rank>(rank));
  } while (reader.accept(","));
  return ranks;
}

int parse_dim(TextReader& reader) {
  return static_cast<int>(
      reader.number(-kMaxDims, kMaxDims - 1, fmt::format("a dim from {} to {}", -kMaxDims, kMaxDims - 1)));
}

Placement parse_ragged(TextReader& reader) {
  RaggedShard ragged;
  ragged.dim = parse_dim(reader);
  reader.expect("[", "\"[\" and the bounds");
  do {
    ragged.bounds.push_back(reader.number(0, kMaxElements, "a bound"));
  } while (reader.accept(";"));
  reader.expect("]", "\";\" or \"]\"");
  return ragged;
}

// The short form of a placement as torch spells it: "Shard(dim=0)" is S0. Empty for any other text.
std::string short_form(std::string_view text) {
  TextReader reader("placement", text);
  reader.accept("_");
  const std::string_view kind = reader.name();
  if (!reader.accept("(")) return kind == "Replicate" ? "R" : kind == "Partial" ? "Psum" : "";
  const std::string_view arguments = text.substr(reader.position(), text.find(')') - reader.position());
  std::vector<Index> numbers;
  for (size_t at = 0; (at = arguments.find_first_of("-0123456789", at)) != std::string_view::npos;) {
    Index number = 0;
    const char* const begin = arguments.data() + at;
    const auto [end, error] = std::from_chars(begin, arguments.data() + arguments.size(), number);
    if (error != std::errc()) return {};
    numbers.push_back(number);
    at += static_cast<size_t>(end - begin);
  }
  if (kind == "Replicate") return "R";
  if (kind == "Shard" && numbers.size() == 1) return fmt::format("S{}", numbers[0]);
  if (kind == "StridedShard" && numbers.size() == 2) return fmt::format("S{}*{}", numbers[0], numbers[1]);
  if (kind != "Partial") return {};
  for (const ReduceOp op : kReduceOps)
    if (arguments.find(to_string(op)) != std::string_view::npos) return fmt::format("P{}", to_string(op));
  return "Psum";
}

Placement parse_placement(TextReader& reader) {
  const size_t begin = reader.position();
  if (const std::string instead = short_form(reader.rest()); !instead.empty())
    reader.fail_expected(fmt::format("{} (which is how that placement is written here)", instead));
  if (reader.accept("R")) return Replicate{};
  if (reader.accept("S")) {
    const int dim = parse_dim(reader);
    if (reader.accept("*")) return StridedShard{dim, reader.number(1, kMaxElements, "a split factor of at least 1")};
    return Shard{dim};
  }
  if (reader.accept("G")) return parse_ragged(reader);
  if (reader.accept("P")) {
    for (const ReduceOp op : kReduceOps) {
      if (reader.accept(to_string(op))) return Partial{op};
    }
  }
  reader.rewind(begin);
  reader.fail_expected(kPlacements);
}

std::vector<Placement> parse_placements(TextReader& reader) {
  std::vector<Placement> placements;
  do {
    if (placements.size() == kMaxAxes) reader.fail_expected(fmt::format("at most {} placements", kMaxAxes));
    placements.push_back(parse_placement(reader));
  } while (reader.accept(","));
  return placements;
}

void append_ranks(fmt::memory_buffer& out, std::span<const Rank> ranks) {
  for (size_t i = 0; i < ranks.size();) {
    size_t end = i + 1;
    while (end < ranks.size() && ranks[end - 1] + 1 == ranks[end]) ++end;
    fmt::format_to(std::back_inserter(out), "{}{}", i == 0 ? "@" : ",", ranks[i]);
    if (end - i > 1) fmt::format_to(std::back_inserter(out), "-{}", ranks[end - 1]);
    i = end;
  }
}

bool counts_from_zero(std::span<const Rank> ranks) {
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] != static_cast<Rank>(i)) return false;
  }
  return true;
}

}  // namespace

Layout Layout::parse(std::string_view text) {
  TextReader reader("layout", text);
  std::vector<Axis> axes = parse_axes(reader);
  std::optional<std::vector<Rank>> ranks;
  if (reader.accept("@")) ranks = parse_ranks(reader);
  reader.expect(":", ranks ? "\",\" and more ranks, or \":\" and the placements"
                           : "\",\" and another axis, \"@\" and the ranks, or \":\" and the placements");
  std::vector<Placement> placements = parse_placements(reader);
  reader.expect_end("\",\" and another placement, or the end");
  try {
    Mesh mesh = ranks ? Mesh(std::move(axes), *std::move(ranks)) : Mesh(std::move(axes));
    return Layout(std::move(mesh), std::move(placements));
  } catch (const Error& error) {
    reader.fail_whole(error.what());
  }
}

std::string Layout::to_string() const {
  fmt::memory_buffer out;
  const char* separator = "";
  for (const Axis& axis : mesh_.axes()) {
    fmt::format_to(std::back_inserter(out), "{}{}{}{}", separator, axis.name, axis.name.empty() ? "" : "=", axis.size);
    separator = ",";
  }
  if (!counts_from_zero(mesh_.ranks())) append_ranks(out, mesh_.ranks());
  separator = ":";
  for (const Placement& placement : placements()) {
    fmt::format_to(std::back_inserter(out), "{}{}", separator, tessera::to_string(placement));
    separator = ",";
  }
  return fmt::to_string(out);
}

}  // namespace tessera
