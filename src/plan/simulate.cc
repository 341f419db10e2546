#include "tessera/simulate.h"

#include <algorithm>
#include <array>

#include "base/fail.h"
#include "plan/reduce_terms.h"

namespace tessera {
namespace {

using Point = std::array<Index, kMaxDims>;

// Packed bytes of `elements`; a trailing half byte counts as one.
size_t packed_bytes(DType dtype, Index elements) {
  return static_cast<size_t>((elements * bits_of(dtype) + 7) / 8);
}

// One rank's local tensor.
struct Local {
  Region owned;
  std::vector<std::byte> bytes;

  // The position of a global element, in elements.
  Index position_of(const Point& point) const {
    Index position = 0;
    for (int d = 0; d < owned.ndim(); ++d)
      position = position * owned.dim(d).size() + owned.dim(d).position_of(point[static_cast<size_t>(d)]);
    return position;
  }
};

// Calls `visit` with the first element of every run along the last dim of a region, and the run's length.
template <typename Visit>  // void(const Point&, Index)
void for_each_run(const Region& region, Visit visit, Point point = {}, int dim = 0) {
  if (region.empty()) return;
  if (region.ndim() == 0) return visit(point, Index{1});
  auto& at = point[static_cast<size_t>(dim)];
  for (const Interval interval : region.dim(dim).intervals()) {
    at = interval.begin;
    if (dim + 1 == region.ndim())
      visit(point, interval.size());
    else
      for (; at < interval.end; ++at) for_each_run(region, visit, point, dim + 1);
  }
}

void copy_elements(int bits, const std::vector<std::byte>& from, Index from_at, std::vector<std::byte>& to, Index to_at,
                   Index count) {
  if (bits >= 8) {
    const Index size = bits / 8;
    std::copy_n(from.begin() + from_at * size, count * size, to.begin() + to_at * size);
    return;
  }
  for (Index i = 0; i < count; ++i) {  // two elements a byte, the even one in the low nibble
    const auto shift = [](Index at) { return static_cast<int>(at % 2 * 4); };
    const std::byte nibble = from[static_cast<size_t>((from_at + i) / 2)] >> shift(from_at + i) & std::byte{15};
    std::byte& byte = to[static_cast<size_t>((to_at + i) / 2)];
    byte = (byte & ~(std::byte{15} << shift(to_at + i))) | nibble << shift(to_at + i);
  }
}

class Simulation {
 public:
  Simulation(const Plan& plan, const LocalArrays& sources) : plan_(plan), bits_(bits_of(plan.meta.dtype)) {
    for (const Rank rank : plan.src.mesh().ranks()) {
      Region owned = plan.src.owned(plan.meta.shape, rank);
      const size_t wanted = packed_bytes(plan.meta.dtype, owned.size());
      const auto given = sources.find(rank);
      if (given == sources.end()) fail(ErrorCode::kInvalidArgument, "no array for source rank {}"_message, rank);
      if (given->second.size() != wanted)
        fail(ErrorCode::kInvalidArgument, "the array of source rank {} has {} bytes, its local tensor {}"_message, rank,
             given->second.size(), wanted);
      sources_[rank] = {std::move(owned), given->second};
    }
    for (const Rank rank : plan.dst.mesh().ranks()) {
      Region owned = plan.dst.owned(plan.meta.shape, rank);
      const size_t size = packed_bytes(plan.meta.dtype, owned.size());
      destinations_[rank] = {std::move(owned), std::vector<std::byte>(size)};
    }
    reduced_ = sources_;
  }

  LocalArrays run() {
    for (const Reduction& reduction : plan_.reductions) reduce(reduction);
    std::map<Rank, Index> written;
    for (const Route& route : plan_.routes) {
      for (const Rank rank : plan_.dsts(route)) {
        move(route.region, reduced_.at(route.src), destinations_.at(rank));
        written[rank] += route.region.size();
      }
    }
    LocalArrays arrays;
    for (auto& [rank, local] : destinations_) {
      if (written[rank] != local.owned.size())
        fail_internal("the plan writes {} elements to rank {}, which holds {}", written[rank], rank,
                      local.owned.size());
      arrays[rank] = std::move(local.bytes);
    }
    return arrays;
  }

 private:
  void move(const Region& region, const Local& from, Local& to) const {
    for_each_run(region, [&](const Point& point, Index count) {
      copy_elements(bits_, from.bytes, from.position_of(point), to.bytes, to.position_of(point), count);
    });
  }

  // The peers are replicas of one region, so an element has the same position in all their arrays.
  void reduce(const Reduction& reduction) {
    const auto peers = plan_.peers(reduction);
    Local& owner = reduced_.at(reduction.owner);
    std::vector<const std::byte*> terms(peers.size());
    for_each_run(reduction.region, [&](const Point& point, Index count) {
      const Index size = bits_ / 8;
      const Index begin = owner.position_of(point) * size;
      for (Index at = begin; at < begin + count * size; at += size) {
        for (size_t i = 0; i < peers.size(); ++i) terms[i] = sources_.at(peers[i]).bytes.data() + at;
        plan::reduce_terms(reduction.op, plan_.meta.dtype, terms, owner.bytes.data() + at);
      }
    });
  }

  const Plan& plan_;
  int bits_;
  std::map<Rank, Local> sources_;
  std::map<Rank, Local> reduced_;  // what owners send: their terms, or what they have reduced in their place
  std::map<Rank, Local> destinations_;
};

}  // namespace

LocalArrays simulate(const Plan& plan, const LocalArrays& sources) {
  return Simulation(plan, sources).run();
}

}  // namespace tessera
