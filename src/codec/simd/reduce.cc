#include "codec/simd/reduce.h"

#include "base/fail.h"
#include "codec/simd/kernel_set.h"
#include "codec/simd/reduce_plain.h"

namespace tessera {
namespace {

bool is_reduced_float(DType dtype) {
  return static_cast<size_t>(dtype) < codec::kReducedFloats;
}
size_t index_of(DType dtype) {
  return static_cast<size_t>(dtype);
}
size_t index_of(ReduceOp op) {
  return static_cast<size_t>(op);
}

void check_reducible(ReduceOp op, DType dtype) {
  if (!reducible(op, dtype))
    fail(ErrorCode::kInvalidArgument,
         "cannot reduce {} by {}: floats of 16 bits and more take every op, c64 sum, avg and product, integers all "
         "except avg"_message,
         to_string(dtype), to_string(op));
}

}  // namespace

bool reducible(ReduceOp op, DType dtype) {
  if (is_reduced_float(dtype)) return true;
  if (is_integer(dtype)) return op != ReduceOp::kAvg;
  return dtype == DType::kC64 && op != ReduceOp::kMin && op != ReduceOp::kMax;
}

DType accumulator_of(DType dtype) {
  if (dtype == DType::kF16 || dtype == DType::kBF16) return DType::kF32;
  check_reducible(ReduceOp::kSum, dtype);
  return dtype;
}

AccumulateRow accumulate_row(ReduceOp op, DType src, bool first) {
  check_reducible(op, src);
  const codec::ReduceKernels& kernels = *codec::active_kernels().reduce;
  if (!is_reduced_float(src)) return codec::plain_accumulate_row(op, src, first);
  return first ? kernels.first[index_of(src)] : kernels.next[index_of(op)][index_of(src)];
}

FinishRow finish_row(ReduceOp op, DType src) {
  check_reducible(op, src);
  const codec::ReduceKernels& kernels = *codec::active_kernels().reduce;
  if (!is_reduced_float(src)) return codec::plain_finish_row(op, src);
  return (op == ReduceOp::kAvg ? kernels.finish_average : kernels.finish)[index_of(src)];
}

}  // namespace tessera
