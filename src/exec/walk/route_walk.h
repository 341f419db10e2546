// Makes walks from routes.
#pragma once

#include "exec/walk/route.h"
#include "exec/walk/walk.h"

namespace tessera {

// Bytes of an atom: of an element, or of a pair of f4.
int64_t atom_bytes(DType dtype);
int64_t elements_per_atom(DType dtype);

// The arrays of a walk. A packed array holds only the region, contiguous.
struct WalkArrays {
  const LocalArray* src = nullptr;  // null: packed, in the source's dtype
  const LocalArray* dst = nullptr;  // null: packed, in `dst_dtype`
  DType dst_dtype = DType::kF32;
  bool image = false;
};

// Throws Error(kInvalidArgument) if an f4 pair is cut or offsets overflow.
Walk make_walk(const RouteRegion& what, const WalkArrays& arrays, Walk::Order order);

}  // namespace tessera
