// Random shapes, meshes and layouts for tests: uneven, empty, nested, strided, ragged, partial, scattered ranks.
#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "tessera/layout.h"

namespace tessera {

// The same seed gives the same values on every machine: std::mt19937_64 with plain remainders.
class RandomLayouts {
 public:
  struct Limits {
    int max_dims = 5;
    Index max_size = 40;        // of a dim
    Index max_elements = 4096;  // of a tensor
    int max_axes = 3;
    int max_ranks = 24;     // of a mesh
    int highest_rank = 47;  // ranks are drawn from 0 to this; at least max_ranks - 1
    // The reductions of Partial axes; empty: no such axes.
    std::vector<ReduceOp> ops{ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct};
  };

  explicit RandomLayouts(uint64_t seed) : random_(seed) {}
  RandomLayouts(uint64_t seed, const Limits& limits) : random_(seed), limits_(limits) {}

  // Uniform in [low, high], up to a tiny bias.
  Index draw(Index low, Index high) {
    return low + static_cast<Index>(random_() % static_cast<uint64_t>(high - low + 1));
  }
  bool one_in(int n) { return draw(1, n) == 1; }
  template <typename T>
  T pick(const std::vector<T>& from) {
    return from[static_cast<size_t>(draw(0, static_cast<Index>(from.size()) - 1))];
  }

  Shape shape() {
    Shape shape(static_cast<size_t>(draw(0, limits_.max_dims)));
    Index room = limits_.max_elements;
    for (Index& size : shape) {
      size = one_in(16) ? 0 : draw(1, std::min(limits_.max_size, room));
      room /= std::max<Index>(size, 1);
    }
    std::shuffle(shape.begin(), shape.end(), random_);
    return shape;
  }

  Mesh mesh() {
    std::vector<Axis> axes(static_cast<size_t>(draw(1, limits_.max_axes)));
    int room = limits_.max_ranks;
    for (Axis& axis : axes) {
      axis.size = static_cast<int>(draw(1, std::min<Index>(room, axes.size() == 1 ? room : 6)));
      room /= axis.size;
    }
    for (size_t i = 0; i < axes.size(); ++i) {
      if (one_in(2)) axes[i].name = std::string(1, static_cast<char>('a' + i));
    }
    int count = 1;
    for (const Axis& axis : axes) count *= axis.size;
    if (one_in(3)) return Mesh(std::move(axes), static_cast<Rank>(draw(0, limits_.highest_rank + 1 - count)));
    std::vector<Rank> ranks;
    for (Rank rank = 0; rank <= limits_.highest_rank; ++rank) ranks.push_back(rank);
    std::shuffle(ranks.begin(), ranks.end(), random_);
    ranks.resize(static_cast<size_t>(count));
    return Mesh(std::move(axes), std::move(ranks));
  }

  // Valid for the shape; dims may be negative.
  Layout layout(const Shape& shape) {
    Mesh made = mesh();
    const ReduceOp op = limits_.ops.empty() ? ReduceOp::kSum : pick(limits_.ops);
    std::vector<Placement> placements;
    std::vector<bool> cut(shape.size());
    for (const Axis& axis : made.axes()) {
      Placement placement = Replicate{};
      const Index kind = draw(0, 9);
      if (kind == 0 && !limits_.ops.empty()) placement = Partial{op};
      if (kind >= 2 && !shape.empty()) {
        const Index dim = draw(0, static_cast<Index>(shape.size()) - 1);
        const auto d = static_cast<size_t>(dim);
        const auto written = static_cast<int>(one_in(4) ? dim - static_cast<Index>(shape.size()) : dim);
        placement = Shard{written};
        if (kind >= 6) placement = StridedShard{written, draw(1, 5)};
        if (kind >= 8 && !cut[d]) placement = RaggedShard{written, bounds(shape[d], axis.size)};
        cut[d] = true;
      }
      placements.push_back(std::move(placement));
    }
    return Layout(std::move(made), std::move(placements));
  }

 private:
  std::vector<Index> bounds(Index size, int count) {
    std::vector<Index> bounds{0, size};
    while (bounds.size() < static_cast<size_t>(count) + 1) bounds.push_back(draw(0, size));
    std::sort(bounds.begin(), bounds.end());
    return bounds;
  }

  std::mt19937_64 random_;
  Limits limits_;
};

}  // namespace tessera
