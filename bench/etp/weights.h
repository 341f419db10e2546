// Weights that the ranks of a group publish to each other, below the runtime; and the ceiling that moves are compared
// with.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "bench/etp/measure.h"
#include "collective/movement/gather.h"
#include "tessera/memory.h"

namespace tessera::bench {

// bf16, cut in equal shards of `shard_bytes`, published in slots from 0 on, and where they are gathered to.
class PlainWeights {
 public:
  // Collective.
  PlainWeights(const Rank& rank, size_t weights, size_t shard_bytes);

  std::span<const collective::GatherPart> parts() const { return parts_; }
  size_t bytes() const { return to_.size(); }  // of what a gather of all writes
  // Throws unless this holds what the ranks have published.
  void check() const;

 private:
  std::vector<SharedBuffer> shards_;
  std::vector<std::byte> to_;
  size_t shard_bytes_;
  int ranks_;
  std::vector<collective::GatherPart> parts_;
};

// copy_stream() of 64 MiB out of shared memory into private memory.
class CopyCeiling {
 public:
  static constexpr size_t kBytes = size_t{64} << 20;
  CopyCeiling();
  void operator()();

 private:
  SharedBuffer from_;
  std::vector<std::byte> to_;
};

}  // namespace tessera::bench
