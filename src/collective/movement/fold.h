// Folds: the gradients that all ranks produced in one round, added to the rows of their owner.
//
//   acc = f32(accumulated); for q = 0..N-1: acc = acc + f32(g_q[rows]) * scale; accumulated = round(acc)
//
// in that order, in f32, without fused operations, in one pass over the memory. A rank that
// closed the interval with fewer rounds contributes nothing. A NaN result is the canonical one
// (codec/float/float_bits.h); subnormals are kept.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "collective/group.h"
#include "device/stream.h"
#include "tessera/dtype.h"

namespace tessera::collective {

// This rank's rows of one weight and round. Gradients lie where each rank's page shows them, [F, columns], contiguous.
struct FoldPart {
  uint32_t slot = 0;
  uint64_t interval = 0;
  uint64_t round = 0;  // from 0
  // Of an operation that is replayed: read when it runs, instead of the values above.
  const uint64_t* interval_now = nullptr;
  const uint64_t* round_now = nullptr;
  int64_t begin_row = 0;   // of the weight's F
  int64_t rows = 0;        // may be 0: then only kFolded is set
  int64_t total_rows = 0;  // F: what each rank's gradient must have
  int64_t columns = 0;
  DType gradient_dtype = DType::kF32;  // f32, f16 or bf16; of every rank
  void* accumulated = nullptr;         // [rows, columns], contiguous
  DType accumulated_dtype = DType::kF32;
  bool first = false;  // nothing is accumulated yet: the fold begins with the first rank's term, and writes only
  float scale = 1;
  int* contributors = nullptr;  // how many ranks had a gradient; written before the operation ends
  std::string_view weight;      // outlives the operation
};

// Enqueues one operation on `stream`, which waits until every rank has produced that round of each part, or closed its
// interval, folds, and sets kFolded to (interval, round + 1). Does not block, except that the first fold of a gradient
// in an arena that is new here asks its owner for it, within the operation. Parts must be in the order of their rounds
// where they have one slot. If no rank has a gradient, `accumulated` stays untouched. Errors of the operation, which
// poison the stream: a gradient of another size or dtype (kMismatch), the group failed.
void fold(Group& group, device::Stream& stream, std::span<const FoldPart> parts);

// The same operation, to be enqueued many times. There must be a part.
std::shared_ptr<const device::Operation> fold_operation(Group& group, std::span<const FoldPart> parts);

}  // namespace tessera::collective
