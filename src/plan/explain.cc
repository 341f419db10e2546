#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <ranges>
#include <span>
#include <tuple>

#include "plan/holders.h"
#include "plan/terms.h"
#include "plan/text.h"
#include "tessera/plan.h"

namespace tessera {

using plan::bytes_text;
using plan::count_text;
using plan::ranks_text;
using plan::ratio_text;

namespace {

constexpr size_t kRows = 40;  // in a table; further rows are only counted

std::string side_text(const plan::Holders& holders, const char* verb) {
  const std::string ranks = count_text(int64_t{holders.classes()} * holders.members(), "rank");
  if (holders.classes() == 1) return fmt::format("{} {} all of it", ranks, verb);
  if (holders.members() == 1) return fmt::format("{} {} a part each", ranks, verb);
  return fmt::format("{} {} {} parts, each part on {} ranks", ranks, verb, holders.classes(), holders.members());
}

std::string shorten(std::string text, size_t limit) {
  if (text.size() > limit) text = text.substr(0, limit - 3) + "...";
  return text;
}

// All pieces that one rank sends to one group, or all terms that it contributes to one owner.
struct Row {
  int64_t pieces = 0;
  int64_t bytes = 0;
  const Region* region = nullptr;

  void add(const Region& piece, int64_t piece_bytes) {
    ++pieces;
    bytes += piece_bytes;
    region = &piece;
  }
};

std::string row_text(Rank from, std::span<const Rank> to, std::string_view how, const Row& row) {
  const std::string what = row.pieces == 1 ? shorten(row.region->to_string(), 48) : count_text(row.pieces, "piece");
  return fmt::format("{:>6}  {:<24} {:<10} {:>12}  {}\n", from, ranks_text(to, 4), how, bytes_text(row.bytes),
                     what.empty() ? "the scalar" : what);
}

std::string more_rows_text(size_t rows) {
  if (rows <= kRows) return {};
  return fmt::format("{:>6}  ... and {}\n", "", count_text(static_cast<int64_t>(rows - kRows), "more row"));
}

std::string term_rows(const Plan& plan) {
  std::map<std::pair<Rank, Rank>, Row> rows;  // by peer and owner
  plan::for_each_term(plan, [&](Rank peer, const Reduction& reduction, int64_t bytes) {
    rows[{peer, reduction.owner}].add(reduction.region, bytes);
  });
  std::string text;
  for (const auto& [key, row] : rows | std::views::take(kRows))
    text += row_text(key.first, std::span(&key.second, 1), "term", row);
  return text + more_rows_text(rows.size());
}

std::string route_table(const Plan& plan) {
  std::map<std::tuple<Rank, RouteKind, uint32_t>, Row> rows;
  for (const Route& route : plan.routes) rows[{route.src, route.kind, route.group}].add(route.region, route.bytes);
  if (rows.empty()) return "Nothing has to move.\n";
  std::string text = fmt::format("{:>6}  {:<24} {:<10} {:>12}  {}\n", "from", "to", "how", "bytes", "what");
  text += term_rows(plan);
  for (const auto& [key, row] : rows | std::views::take(kRows)) {
    const auto& [src, kind, group] = key;
    text += row_text(src, plan.groups[group], to_string(kind), row);
  }
  return text + more_rows_text(rows.size());
}

std::string reduction_text(const Plan& plan) {
  if (plan.reductions.empty()) return {};
  std::map<uint32_t, int64_t> owned;  // by peers
  std::vector<Rank> owners;
  for (const Reduction& reduction : plan.reductions) {
    ++owned[reduction.group];
    owners.push_back(reduction.owner);
  }
  std::ranges::sort(owners);
  owners.erase(std::ranges::unique(owners).begin(), owners.end());
  return fmt::format(
      "Every element is reduced once ({}), by one of {}: {} read from peers for that.\n",
      to_string(plan.reductions.front().op),
      owners.size() == 1 ? "one owner" : fmt::format("{} owners ({})", owners.size(), ranks_text(owners)),
      bytes_text(plan.stats.reduction_bytes));
}

}  // namespace

std::string explain(const Plan& plan) {
  const PlanStats& stats = plan.stats;
  const auto ndim = static_cast<int>(plan.meta.shape.size());
  std::string text =
      fmt::format("{} of {}\n  from {}\n  to   {}\n\n", to_string_shape(plan.meta.shape), to_string(plan.meta.dtype),
                  shorten(plan.src.to_string(), 100), shorten(plan.dst.to_string(), 100));
  const plan::Holders sources(plan.src, ndim);
  text += fmt::format("{}; {}.\n", side_text(sources, sources.peers() > 1 ? "hold terms of" : "hold"),
                      side_text(plan::Holders(plan.dst, ndim), "want"));
  text += reduction_text(plan);
  text += '\n' + route_table(plan) + '\n';

  const auto line = [&](const char* name, const std::string& value) {
    text += fmt::format("{:<18} {}\n", name, value);
  };
  line("routes", fmt::to_string(stats.routes));
  line("delivered", fmt::format("{}, {} of it local", bytes_text(stats.bytes_delivered),
                                bytes_text(stats.bytes_delivered - stats.bytes_moved)));
  line("moved", bytes_text(stats.bytes_moved));
  line("lower bound", fmt::format("{} (moved / bound: {})", bytes_text(stats.bytes_lower_bound),
                                  ratio_text(stats.bytes_moved, stats.bytes_lower_bound)));
  if (stats.bytes_between_hosts > 0) line("between hosts", bytes_text(stats.bytes_between_hosts));
  if (stats.reduction_bytes > 0) line("reduction", bytes_text(stats.reduction_bytes));
  line("busiest source", fmt::format("{}, at least {} must (imbalance: {})", bytes_text(stats.max_egress),
                                     bytes_text(stats.max_egress_lower_bound),
                                     ratio_text(stats.max_egress, stats.max_egress_lower_bound)));
  return text;
}

}  // namespace tessera
