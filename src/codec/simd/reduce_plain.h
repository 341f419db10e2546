// Reductions of integers and complex numbers. They are rare, so there is only one variant.
#pragma once

#include "codec/simd/reduce.h"

namespace tessera::codec {

// REQUIRES: reducible(op, src), and src is an integer or c64.
AccumulateRow plain_accumulate_row(ReduceOp op, DType src, bool first);
FinishRow plain_finish_row(ReduceOp op, DType src);

}  // namespace tessera::codec
