// The tensors of one rank of a benchmark. A case says in which memory they lie. Values depend on an element's place.
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
  // `rank`'s part of the case's tensors, at the source or at the destination, in one block of memory, which is touched.
  static RankTensors of_source(const Case& c, Rank rank);
  static RankTensors of_destination(const Case& c, Rank rank);

  // The tensors to register; they point into this object.
  std::vector<TensorSpec> specs() const;
  // At a destination: checks some thousands of elements all over the memory. Throws kDataLoss that names the first one
  // that differs from what the sources hold.
  void check() const;

 private:
  // This rank's part of the tensors of a group.
  struct Part {
    Shape shape;
    Layout layout;
    Region owned;  // one interval for each dim, unless it is empty
    DType dtype;
    int tensors;
    size_t offset;  // of the first one, from data_
    size_t bytes;   // of each
  };
  enum class Side { kSource, kDestination };

  RankTensors(const Case& c, Side side, Rank rank, Memory memory);
  void fill();

  std::vector<Part> parts_;
  SharedBuffer shared_;
  std::unique_ptr<std::byte[]> private_;
  std::byte* data_ = nullptr;
};

}  // namespace tessera::bench
