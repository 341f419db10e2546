// Gradients of tensors that every rank has whole: norms, biases. They are folded over the group at each drain, in rank
// order, bucket by bucket.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "etp/context.h"

namespace tessera::etp {

// Of tensors of so many bytes each, in this order: the bytes of the largest bucket.
int64_t largest_bucket(std::span<const int64_t> tensors);

// Under the runtime's lock.
class ReplicatedGradients {
 public:
  explicit ReplicatedGradients(RuntimeContext& context) : context_(context) {}

  uint32_t add(const std::string& name, int64_t elements, DType dtype);
  // For the next drain.
  void give(uint32_t replicated, const void* gradient, void* accumulated, DType accumulated_dtype);
  // Collective. Forgets what was given, also where it throws.
  void fold();
  // Returns how many ranks gave a gradient at the last fold, for each tensor.
  std::vector<int> ranks() const;
  void forget();
  int64_t bytes() const;     // of the bucket
  int64_t forecast() const;  // likewise, before the first fold

 private:
  struct Tensor {
    std::string name;
    int64_t elements = 0;
    DType dtype = DType::kF32;
    const void* gradient = nullptr;
    void* accumulated = nullptr;
    DType accumulated_dtype = DType::kF32;
    int ranks = 0;  // that gave a gradient at the last fold

    int64_t bytes() const { return bytes_of(dtype, elements); }
  };
  void fold_bucket(size_t first, size_t end);

  RuntimeContext& context_;
  std::vector<Tensor> tensors_;
  std::vector<int64_t> bytes_;  // of each
  device::Buffer bucket_;
};

}  // namespace tessera::etp
