// Reducing a Partial source: the owner of a region pulls it from every peer in ascending rank order into an accumulator
// (f32; f64 for f64; integers as they are), then rounds once to the source's dtype. What it stores is then an ordinary
// source that receivers pull.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "exec/pull/compiler.h"
#include "exec/worker_pool.h"
#include "tessera/dtype.h"
#include "tessera/layout.h"

namespace tessera {

// One region that this rank reduces. `accumulator` and `result` hold only the region, contiguous row-major.
struct ReductionTarget {
  ReduceOp op = ReduceOp::kSum;
  DType dtype = DType::kF32;  // the source's, and the result's
  Index elements = 0;
  int peers = 1;  // terms: avg divides by it
  std::byte* accumulator =
      nullptr;  // elements of accumulator_of(dtype) (codec/simd/reduce.h); may equal `result` if the dtypes are equal
  std::byte* result = nullptr;
};

// All reductions of one rank in a batch. Steps run one after the other: step i holds the routes from peer i (ascending
// rank), each with Combine::kFirst or kAccumulate into its target's accumulator. The bus makes the PullPrograms and
// must see to it that the first peer of every target is the one with kFirst. Reusable; start() allocates nothing. Same
// contract as TransferRun.
class ReduceRun {
 public:
  using Done = TransferRun::Done;
  struct Step {
    std::shared_ptr<const PullProgram> program;
    std::shared_ptr<ByteStream> stream;  // if the program wants one
    // Called as the step is about to begin, by a worker thread or by start(): asks the peer to fill the stream. May be
    // empty.
    std::function<void()> on_start;
  };
  ReduceRun(std::vector<Step> steps, std::vector<ReductionTarget> targets, WorkerPool& pool, Done done,
            const RunOptions& options = {});
  ~ReduceRun();  // REQUIRES: not running

  // Results are stored `result_offset` bytes behind where their targets say.
  void start(uint32_t epoch, size_t result_offset = 0);
  void abort(const Status& status);
  bool running() const;
  int64_t bytes_done() const;
  int64_t bytes() const;
  Status status() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
