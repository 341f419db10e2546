// The meaning of DTensor's placements, element by element: the oracle for tests of layout and plan.
//
// It lists elements one by one and distributes them, without intervals or arithmetic on positions, so that it shares no
// idea with the code under test. Only for tests; small tensors.
#pragma once

#include <string>
#include <variant>
#include <vector>

#include "tessera/layout.h"

namespace tessera::brute {

using Elements = std::vector<Index>;  // along one dim, in local order

// torch.chunk: `count` lists of ceil(size / count) elements until none are left.
inline std::vector<Elements> chunk(const Elements& elements, Index count) {
  std::vector<Elements> chunks(static_cast<size_t>(count));
  const size_t length = (elements.size() + chunks.size() - 1) / chunks.size();
  for (size_t i = 0; i < elements.size(); ++i) chunks[i / length].push_back(elements[i]);
  return chunks;
}

// The elements that the rank at `coordinate` of an axis keeps of those that the axes to the left have left it, if the
// placement concerns their dim.
inline Elements keep(const Elements& held, const Placement& placement, int axis_size, int coordinate) {
  const auto mine = static_cast<size_t>(coordinate);
  if (std::holds_alternative<Shard>(placement)) return chunk(held, axis_size)[mine];
  if (const auto* strided = std::get_if<StridedShard>(&placement)) {
    Elements kept;
    for (const Elements& piece : chunk(held, strided->split_factor)) {
      const Elements part = chunk(piece, axis_size)[mine];
      kept.insert(kept.end(), part.begin(), part.end());
    }
    return kept;
  }
  if (const auto* ragged = std::get_if<RaggedShard>(&placement)) {
    Elements kept;
    for (const Index element : held) {
      if (ragged->bounds[mine] <= element && element < ragged->bounds[mine + 1]) kept.push_back(element);
    }
    return kept;
  }
  return held;
}

// The dim that a placement shards, negative ones counted from the end; -1 for none.
inline int dim_of(const Placement& placement, int ndim) {
  int dim = -1;
  if (const auto* shard = std::get_if<Shard>(&placement)) {
    dim = shard->dim;
  } else if (const auto* strided = std::get_if<StridedShard>(&placement)) {
    dim = strided->dim;
  } else if (const auto* ragged = std::get_if<RaggedShard>(&placement)) {
    dim = ragged->dim;
  } else {
    return -1;
  }
  return dim < 0 ? dim + ndim : dim;
}

// For every dim, the elements along it that the rank at a row-major position of the mesh holds. Bound or not.
inline std::vector<Elements> held_along(const Layout& layout, const Shape& shape, int position) {
  std::vector<int> coordinate(layout.mesh().axes().size());
  for (size_t axis = coordinate.size(); axis-- > 0;) {
    coordinate[axis] = position % layout.mesh().axes()[axis].size;
    position /= layout.mesh().axes()[axis].size;
  }
  std::vector<Elements> held(shape.size());
  for (size_t d = 0; d < shape.size(); ++d) {
    for (Index i = 0; i < shape[d]; ++i) held[d].push_back(i);
    for (size_t axis = 0; axis < coordinate.size(); ++axis) {
      const Placement& placement = layout.placements()[axis];
      if (dim_of(placement, static_cast<int>(shape.size())) != static_cast<int>(d)) continue;
      held[d] = keep(held[d], placement, layout.mesh().axes()[axis].size, coordinate[axis]);
    }
  }
  return held;
}

// Row-major global indices of the elements that the rank at a position holds, in local order: entry i is local element
// i.
inline std::vector<Index> held_elements(const Layout& layout, const Shape& shape, int position) {
  std::vector<Index> flat{0};
  const std::vector<Elements> held = held_along(layout, shape, position);
  for (size_t d = 0; d < shape.size(); ++d) {
    std::vector<Index> longer;
    for (const Index base : flat) {
      for (const Index element : held[d]) longer.push_back(base * shape[d] + element);
    }
    flat = std::move(longer);
  }
  return flat;
}

// mask[element][position]: whether the rank at that position of the mesh holds that element (row-major global index).
inline std::vector<std::vector<bool>> owner_mask(const Layout& layout, const Shape& shape) {
  size_t count = 1;
  for (const Index size : shape) count *= static_cast<size_t>(size);
  std::vector<std::vector<bool>> mask(count, std::vector<bool>(static_cast<size_t>(layout.mesh().size())));
  for (int position = 0; position < layout.mesh().size(); ++position) {
    for (const Index element : held_elements(layout, shape, position)) {
      mask[static_cast<size_t>(element)][static_cast<size_t>(position)] = true;
    }
  }
  return mask;
}

}  // namespace tessera::brute
