// Gradients of tensors that every rank has whole: norms, biases. They are folded over the group at each drain, in rank
// order, bucket by bucket.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "etp/context.h"

namespace tessera::etp {

// Under the runtime's lock.
class ReplicatedGradients {
 public:
  static constexpr int64_t kBucketBytes = int64_t{16} << 20;

  explicit ReplicatedGradients(RuntimeContext& context) : context_(context) {}

  uint32_t add(const std::string& name, int64_t elements, DType dtype);
  // For the next drain.
  void give(uint32_t replicated, const void* gradient, void* accumulated, DType accumulated_dtype);
  // Collective. Forgets what was given.
  void fold();
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

    int64_t bytes() const { return bytes_of(dtype, elements); }
  };
  // The tensors from `first` on that fit a bucket; at least one.
  size_t end_of_bucket(size_t first) const;
  void fold_bucket(size_t first, size_t end);

  RuntimeContext& context_;
  std::vector<Tensor> tensors_;
  device::Buffer bucket_;
};

}  // namespace tessera::etp
