#include "plan/testing/property_check.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <random>
#include <set>

#include "layout/brute_force.h"
#include "tessera/error.h"
#include "tessera/simulate.h"

namespace tessera::plan {
namespace {

class Judge {
 public:
  explicit Judge(const Case& c)
      : case_(c),
        holds_(brute::owner_mask(c.src, c.meta.shape)),
        wants_(brute::owner_mask(c.dst, c.meta.shape)),
        partial_(c.src.has_partial()) {
    find_classes();
  }

  void judge(const Plan& plan) {
    check_coverage(plan);
    check_figures(plan);
    check_balance(plan);
    check_pieces(plan);
    check_arrays(plan);
    check_parts(plan);
  }

 private:
  Index elements() const { return static_cast<Index>(holds_.size()); }
  int64_t bytes(Index count) const { return count * bits_of(case_.meta.dtype) / 8; }
  static std::vector<size_t> positions(const std::vector<bool>& mask) {
    std::vector<size_t> set;
    for (size_t i = 0; i < mask.size(); ++i)
      if (mask[i]) set.push_back(i);
    return set;
  }
  Rank source(size_t position) const { return case_.src.mesh().ranks()[position]; }
  Rank destination(size_t position) const { return case_.dst.mesh().ranks()[position]; }
  int host(Rank rank) const {
    for (size_t h = 0; h < case_.options.hosts.size(); ++h)
      if (std::ranges::count(case_.options.hosts[h], rank) > 0) return static_cast<int>(h);
    return -1;
  }

  // Row-major global indices of the elements of a region.
  std::vector<Index> elements_of(const Region& region) const {
    std::vector<Index> flat{0};
    for (int d = 0; d < region.ndim(); ++d) {
      std::vector<Index> longer;
      for (const Index base : flat)
        for (const Interval interval : region.dim(d).intervals())
          for (Index i = interval.begin; i < interval.end; ++i)
            longer.push_back(base * case_.meta.shape[static_cast<size_t>(d)] + i);
      flat = std::move(longer);
    }
    return flat;
  }

  // For each element, the sets of ranks that hold it and that want it, and the two counts behind the bounds.
  void find_classes() {
    std::map<std::vector<size_t>, std::pair<Index, Index>> needed;  // by holders: all elements, elements to serve
    for (size_t e = 0; e < holds_.size(); ++e) {
      const auto holders = positions(holds_[e]);
      std::set<Rank> holding;
      std::set<int> serving_hosts;
      for (const size_t p : holders) {
        holding.insert(source(p));
        serving_hosts.insert(host(source(p)));
      }
      Index lacking = 0;
      Index wanting = 0;
      std::set<int> wanting_hosts;
      for (const size_t p : positions(wants_[e])) {
        ++wanting;
        if (!holding.contains(destination(p))) ++lacking;
        if (partial_ || !holding.contains(destination(p))) wanting_hosts.insert(host(destination(p)));
      }
      if (partial_) lacking = wanting - (lacking < wanting ? 1 : 0);
      lower_bound_ += lacking;
      Index shared_hosts = 0;
      for (const int h : wanting_hosts) shared_hosts += serving_hosts.contains(h) ? 1 : 0;
      if (partial_) shared_hosts = std::min<Index>(shared_hosts, 1);
      crossings_ += static_cast<Index>(wanting_hosts.size()) - shared_hosts;
      if (lacking > 0) ++needed[holders].second;
      wanted_.push_back(wanting);
    }
    for (const auto& [holders, count] : needed) {
      const auto members = static_cast<Index>(holders.size());
      egress_bound_ = std::max(egress_bound_, (bytes(count.second) + members - 1) / members);
      largest_share_ = std::max(largest_share_, (count.second + members - 1) / members);
    }
  }

  void check_coverage(const Plan& plan) {
    std::vector<std::vector<int>> written(wants_.size(), std::vector<int>(case_.dst.mesh().ranks().size(), 0));
    std::map<Rank, std::vector<int>> reduced;
    for (const Reduction& reduction : plan.reductions) {
      ASSERT_EQ(reduction.op, case_.src.partial_op());
      auto& times = reduced.try_emplace(reduction.owner, wants_.size(), 0).first->second;
      for (const Index e : elements_of(reduction.region)) ++times[static_cast<size_t>(e)];
      check_peers(plan, reduction);
    }
    for (const Route& route : plan.routes) {
      const auto src = case_.src.mesh().position_of(route.src);
      ASSERT_TRUE(src.has_value());
      const auto region = elements_of(route.region);
      ASSERT_EQ(route.bytes, bytes(static_cast<Index>(region.size())));
      ASSERT_FALSE(region.empty());
      ASSERT_TRUE(std::ranges::is_sorted(plan.dsts(route)));
      ASSERT_EQ(route.kind == RouteKind::kMulticast, plan.dsts(route).size() > 1);
      ASSERT_EQ(route.kind == RouteKind::kLocal, std::ranges::count(plan.dsts(route), route.src) > 0);
      for (const Index e : region) {
        const auto i = static_cast<size_t>(e);
        ASSERT_TRUE(holds_[i][static_cast<size_t>(*src)]);
        if (partial_) {
          ASSERT_EQ(reduced.at(route.src)[i], 1);
        }
        for (const Rank dst : plan.dsts(route)) ++written[i][static_cast<size_t>(*case_.dst.mesh().position_of(dst))];
      }
    }
    for (size_t e = 0; e < wants_.size(); ++e) {
      for (size_t p = 0; p < wants_[e].size(); ++p) ASSERT_EQ(written[e][p], wants_[e][p] ? 1 : 0);
      int owners = 0;
      for (const auto& [owner, times] : reduced) owners += times[e];
      ASSERT_EQ(owners, partial_ && wanted_[e] > 0 ? 1 : 0);
    }
  }

  // One term for each coordinate of the Partial axes; all have the owner's coordinates along the other axes.
  void check_peers(const Plan& plan, const Reduction& reduction) {
    std::vector<Rank> expected;
    const Mesh& mesh = case_.src.mesh();
    const auto owner = mesh.coordinate(*mesh.position_of(reduction.owner));
    for (int position = 0; position < mesh.size(); ++position) {
      const auto at = mesh.coordinate(position);
      bool is_peer = true;
      for (size_t a = 0; a < at.size(); ++a)
        is_peer = is_peer && (at[a] == owner[a] || std::holds_alternative<Partial>(case_.src.placements()[a]));
      if (is_peer) expected.push_back(mesh.ranks()[static_cast<size_t>(position)]);
    }
    std::ranges::sort(expected);
    ASSERT_TRUE(std::ranges::equal(plan.peers(reduction), expected));
  }

  void check_figures(const Plan& plan) {
    int64_t delivered = 0;
    int64_t moved = 0;
    int64_t crossed = 0;
    int64_t reduced = 0;
    for (const Route& route : plan.routes) {
      const auto dsts = plan.dsts(route);
      delivered += route.bytes * static_cast<int64_t>(dsts.size());
      if (route.kind != RouteKind::kLocal) moved += route.bytes * static_cast<int64_t>(dsts.size());
      std::set<int> hosts;
      for (const Rank dst : dsts) hosts.insert(host(dst));
      hosts.erase(host(route.src));
      crossed += route.bytes * static_cast<int64_t>(hosts.size());
    }
    for (const Reduction& reduction : plan.reductions)
      reduced += bytes(reduction.region.size()) * (static_cast<int64_t>(plan.peers(reduction).size()) - 1);
    Index wanted = 0;
    for (const Index w : wanted_) wanted += w;
    EXPECT_EQ(plan.stats.bytes_delivered, delivered);
    EXPECT_EQ(plan.stats.bytes_delivered, bytes(wanted));
    EXPECT_EQ(plan.stats.bytes_moved, moved);
    EXPECT_EQ(plan.stats.bytes_lower_bound, bytes(lower_bound_));
    EXPECT_EQ(plan.stats.bytes_moved, plan.stats.bytes_lower_bound);
    EXPECT_EQ(plan.stats.bytes_between_hosts, crossed);
    EXPECT_EQ(plan.stats.bytes_between_hosts, bytes(crossings_));
    EXPECT_EQ(plan.stats.reduction_bytes, reduced);
    EXPECT_EQ(plan.stats.routes, static_cast<int64_t>(plan.routes.size()));
    EXPECT_EQ(plan.stats.max_egress_lower_bound, egress_bound_);
    EXPECT_EQ(std::set(plan.groups.begin(), plan.groups.end()).size(), plan.groups.size());
  }

  void check_balance(const Plan& plan) {
    std::map<Rank, int64_t> egress;
    for (const Route& route : plan.routes)
      if (route.kind != RouteKind::kLocal) egress[route.src] += route.bytes;
    EXPECT_EQ(plan.egress(), (std::vector<std::pair<Rank, int64_t>>(egress.begin(), egress.end())));
    int64_t largest = 0;
    for (const auto& [rank, sent] : egress) largest = std::max(largest, sent);
    EXPECT_EQ(plan.stats.max_egress, largest);
    if (partial_ || !case_.options.hosts.empty() || case_.options.min_piece_bytes > 0) return;
    if (case_.meta.dtype == DType::kF4) return;  // may only be cut at whole bytes
    const auto allowed = static_cast<double>(egress_bound_) * 1.05;
    EXPECT_LE(static_cast<double>(largest), std::max(allowed, static_cast<double>(bytes(largest_share_))));
  }

  void check_pieces(const Plan& plan) {
    for (const Route& route : plan.routes) {
      const auto cell = [&] {
        return case_.src.bind(case_.meta.shape)
            .owned(case_.meta.shape, route.src)
            .intersect(case_.dst.bind(case_.meta.shape).owned(case_.meta.shape, plan.dsts(route)[0]));
      };
      if (route.bytes < case_.options.min_piece_bytes) {
        EXPECT_EQ(route.region.to_string(), cell().to_string()) << route.bytes;
      }
      if (case_.meta.dtype == DType::kF4) check_whole_bytes(plan, route);
    }
  }

  // Elements of a byte travel together, from one byte into one byte.
  void check_whole_bytes(const Plan& plan, const Route& route) {
    const auto taken = elements_of(route.region);
    const auto place = [](const std::vector<Index>& local, Index element) {
      return std::ranges::lower_bound(local, element) - local.begin();
    };
    const auto from = brute::held_elements(case_.src, case_.meta.shape, *case_.src.mesh().position_of(route.src));
    const auto to =
        brute::held_elements(case_.dst, case_.meta.shape, *case_.dst.mesh().position_of(plan.dsts(route)[0]));
    ASSERT_EQ(taken.size() % 2, 0U);
    for (size_t i = 0; i < taken.size(); i += 2) {
      ASSERT_EQ(place(from, taken[i]) % 2, 0);
      ASSERT_EQ(place(from, taken[i + 1]), place(from, taken[i]) + 1);
      ASSERT_EQ(place(to, taken[i]) % 2, 0);
      ASSERT_EQ(place(to, taken[i + 1]), place(to, taken[i]) + 1);
    }
  }

  // --- what arrives ---

  static std::vector<std::byte> pack(DType dtype, const std::vector<double>& values) {
    std::vector<std::byte> bytes((values.size() * static_cast<size_t>(bits_of(dtype)) + 7) / 8);
    for (size_t i = 0; i < values.size(); ++i) {
      const auto put = [&](auto value) { std::memcpy(bytes.data() + i * sizeof(value), &value, sizeof(value)); };
      switch (dtype) {
        case DType::kF64:
          put(values[i]);
          break;
        case DType::kF32:
          put(static_cast<float>(values[i]));
          break;
        case DType::kBF16: {
          const auto bits = std::bit_cast<uint32_t>(static_cast<float>(values[i]));
          put(static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16));
          break;
        }
        case DType::kI64:
          put(static_cast<int64_t>(values[i]));
          break;
        case DType::kI32:
          put(static_cast<int32_t>(values[i]));
          break;
        case DType::kF4:
          bytes[i / 2] |= static_cast<std::byte>((static_cast<int>(values[i]) & 15) << (i % 2 * 4));
          break;
        default:
          put(static_cast<uint8_t>(static_cast<int>(values[i]) % 251));
          break;
      }
    }
    return bytes;
  }

  // A small integer, so that sums and products are exact.
  double term(size_t element, Rank rank) const {
    const auto mixed = (element * 31 + static_cast<size_t>(rank) * 17) * 0x9E3779B97F4A7C15 >> 40;
    if (case_.src.partial_op() == ReduceOp::kProduct) return mixed % 7 == 0 ? 2 : 1;
    return static_cast<double>(mixed % 9);
  }

  double expected(size_t element) const {
    if (!partial_) return static_cast<double>(element);
    const ReduceOp op = *case_.src.partial_op();
    std::vector<double> terms;
    // Replicas hold equal terms in a correct program. Here every rank has a different term, and only one replica may be
    // summed.
    const auto& times = owner_of_.at(element);
    for (const Rank rank : times) terms.push_back(term(element, rank));
    double value = terms[0];
    for (size_t i = 1; i < terms.size(); ++i) {
      switch (op) {
        case ReduceOp::kSum:
        case ReduceOp::kAvg:
          value += terms[i];
          break;
        case ReduceOp::kProduct:
          value *= terms[i];
          break;
        case ReduceOp::kMin:
          value = std::min(value, terms[i]);
          break;
        case ReduceOp::kMax:
          value = std::max(value, terms[i]);
          break;
      }
    }
    if (op != ReduceOp::kAvg) return value;
    if (case_.meta.dtype == DType::kF64) return value / static_cast<double>(terms.size());
    return static_cast<float>(value) / static_cast<float>(terms.size());
  }

  void check_arrays(const Plan& plan) {
    owner_of_.assign(wants_.size(), {});
    for (const Reduction& reduction : plan.reductions)
      for (const Index e : elements_of(reduction.region))
        owner_of_[static_cast<size_t>(e)].assign(plan.peers(reduction).begin(), plan.peers(reduction).end());
    LocalArrays sources;
    for (int p = 0; p < case_.src.mesh().size(); ++p) {
      const Rank rank = source(static_cast<size_t>(p));
      std::vector<double> values;
      for (const Index e : brute::held_elements(case_.src, case_.meta.shape, p))
        values.push_back(partial_ ? term(static_cast<size_t>(e), rank) : static_cast<double>(e));
      sources[rank] = pack(case_.meta.dtype, values);
    }
    const LocalArrays arrived = simulate(plan, sources);
    ASSERT_EQ(arrived.size(), case_.dst.mesh().ranks().size());
    for (int p = 0; p < case_.dst.mesh().size(); ++p) {
      std::vector<double> values;
      for (const Index e : brute::held_elements(case_.dst, case_.meta.shape, p))
        values.push_back(expected(static_cast<size_t>(e)));
      ASSERT_EQ(arrived.at(destination(static_cast<size_t>(p))), pack(case_.meta.dtype, values));
    }
  }

  // --- the part of each rank ---

  static std::string line(const Plan& plan, const Route& route) {
    std::string text = std::to_string(route.src) + " " + std::string(to_string(route.kind)) + " " +
                       route.region.to_string() + " " + std::to_string(route.bytes);
    for (const Rank dst : plan.dsts(route)) text += " " + std::to_string(dst);
    return text;
  }
  static std::string line(const Plan& plan, const Reduction& reduction) {
    std::string text = std::to_string(reduction.owner) + " " + reduction.region.to_string();
    for (const Rank peer : plan.peers(reduction)) text += " " + std::to_string(peer);
    return text;
  }

  void check_parts(const Plan& plan) {
    BatchPlanner batch(case_.options);
    batch.add(case_.meta, case_.src, case_.dst);
    std::set<Rank> ranks(case_.src.mesh().ranks().begin(), case_.src.mesh().ranks().end());
    ranks.insert(case_.dst.mesh().ranks().begin(), case_.dst.mesh().ranks().end());
    ranks.insert(99);
    std::map<Rank, std::vector<std::string>> routes;
    std::map<Rank, std::vector<std::string>> reductions;
    const Plan whole = batch.plan(0);
    ASSERT_EQ(whole.stats.bytes_moved, plan.stats.bytes_moved);
    for (const Route& route : whole.routes) {
      const std::string text = line(whole, route);
      for (const Rank dst : whole.dsts(route)) routes[dst].push_back(text);
      if (route.kind != RouteKind::kLocal) routes[route.src].push_back(text);
    }
    for (const Reduction& reduction : whole.reductions)
      for (const Rank peer : whole.peers(reduction)) reductions[peer].push_back(line(whole, reduction));
    for (const Rank rank : ranks) {
      const Plan part = batch.plan_for(0, rank);
      std::vector<std::string> part_routes;
      for (const Route& route : part.routes) part_routes.push_back(line(part, route));
      ASSERT_EQ(part_routes, routes[rank]) << "rank " << rank;
      std::vector<std::string> part_reductions;
      for (const Reduction& reduction : part.reductions) part_reductions.push_back(line(part, reduction));
      ASSERT_EQ(part_reductions, reductions[rank]) << "rank " << rank;
    }
  }

  const Case& case_;
  std::vector<std::vector<bool>> holds_;  // by element and position in the source mesh
  std::vector<std::vector<bool>> wants_;
  bool partial_;
  std::vector<Index> wanted_;
  std::vector<std::vector<Rank>> owner_of_;
  Index lower_bound_ = 0;
  Index crossings_ = 0;
  Index largest_share_ = 0;
  int64_t egress_bound_ = 0;
};

}  // namespace

std::string Case::text() const {
  std::string line = to_string_shape(meta.shape) + " " + std::string(to_string(meta.dtype)) + " " + src.to_string() +
                     " -> " + dst.to_string() + " min_piece " + std::to_string(options.min_piece_bytes) + " hosts";
  for (const auto& host : options.hosts) {
    line += " [";
    for (const Rank rank : host) line += std::to_string(rank) + " ";
    line += "]";
  }
  return line;
}

Case random_case(RandomLayouts& with_partial, RandomLayouts& without_partial) {
  RandomLayouts& random = without_partial;
  Case c;
  c.meta.shape = random.shape();
  c.src = with_partial.layout(c.meta.shape);
  c.dst = random.layout(c.meta.shape);
  constexpr std::array kPlain{DType::kU8, DType::kBF16, DType::kF32, DType::kI64, DType::kF4, DType::kBool};
  constexpr std::array kReducible{DType::kF32, DType::kI32, DType::kF64, DType::kBF16};
  c.meta.dtype = c.src.has_partial() ? kReducible[static_cast<size_t>(random.draw(0, 3))]
                                     : kPlain[static_cast<size_t>(random.draw(0, 5))];
  if (c.src.partial_op() == ReduceOp::kAvg && c.meta.dtype == DType::kI32) c.meta.dtype = DType::kF32;
  if (random.one_in(4)) c.options.min_piece_bytes = random.draw(1, 200);
  if (random.one_in(3)) {
    c.options.hosts.resize(static_cast<size_t>(random.draw(1, 4)));
    for (Rank rank = 0; rank < 48; ++rank) {
      const auto host = static_cast<size_t>(random.draw(0, static_cast<Index>(c.options.hosts.size())));
      if (host < c.options.hosts.size()) c.options.hosts[host].push_back(rank);
    }
  }
  return c;
}

bool check_case(const Case& c) {
  Plan plan;
  try {
    plan = redistribute(c.meta, c.src, c.dst, c.options);
  } catch (const Error& error) {
    EXPECT_EQ(c.meta.dtype, DType::kF4) << error.what();
    EXPECT_NE(std::string(error.what()).find("byte"), std::string::npos) << error.what();
    return false;
  }
  Judge(c).judge(plan);
  return true;
}

}  // namespace tessera::plan
