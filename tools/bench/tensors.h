// The tensors that one rank of a benchmark holds: memory of the kind wanted, contents that tell every element's place.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "tessera/bus.h"
#include "tessera/memory.h"
#include "tools/bench/case.h"

namespace tessera::bench {

// Move-only; thread-compatible.
class RankTensors {
 public:
  // `rank`'s part of the case's tensors, at the source or at the destination. One block of memory, touched.
  static RankTensors of_source(const Case& c, Rank rank);
  static RankTensors of_destination(const Case& c, Rank rank);

  // What to register; points into this object.
  std::vector<TensorSpec> specs() const;
  // At a destination: looks at some thousands of elements all over the memory. Throws kDataLoss that names the first
  // one that is not what the sources hold.
  void check() const;

 private:
  RankTensors(const Case& c, const std::string& layout, Rank rank, DType dtype, Memory memory);
  void fill();
  Index local_elements() const { return owned_.size(); }

  Shape shape_;
  Layout layout_;
  Region owned_;  // one interval a dim
  DType dtype_;
  int tensors_;
  SharedBuffer shared_;
  std::unique_ptr<std::byte[]> private_;
  std::byte* data_ = nullptr;
};

}  // namespace tessera::bench
