// Copies of the tensors that a rank registers, packed into one stretch of memory: the place of each, and the routes
// that copy it.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "bus/registration/local_tensors.h"
#include "exec/walk/route.h"
#include "tessera/bus.h"

namespace tessera::bus {

// Contiguous, one after another; a tensor that is tied to an earlier one shares its place. If it travels in the format
// of its quantised copy, that lies behind it.
class Packing {
 public:
  static constexpr uint64_t kAlignment = 64;

  // `left_out` says which tensors are not copied; those without data here never are.
  Packing(const Manifest& manifest, std::span<const TensorSpec> tensors, Rank rank, std::span<const uint32_t> ties,
          const std::function<bool(size_t)>& left_out);

  uint64_t bytes() const { return bytes_; }
  bool holds(size_t tensor) const { return held_[tensor]; }
  uint64_t offset(size_t tensor) const { return offsets_[tensor]; }
  // The tensors as they are placed if the packing begins at `base`; left-out tensors as they were registered.
  std::vector<TensorSpec> specs_at(std::byte* base) const;
  // The copies from the registered tensors into the packing at `base`, and the other way round.
  std::vector<PullRoute> routes_in(std::byte* base) const;
  std::vector<PullRoute> routes_out(std::byte* base) const;

 private:
  std::vector<PullRoute> routes(std::byte* base, bool in) const;
  void place_copy(size_t tensor);

  const Manifest& manifest_;
  const Rank rank_;
  std::vector<TensorSpec> specs_;  // packed, without their places
  std::vector<LocalTensor> user_;
  std::vector<uint32_t> ties_;
  std::vector<bool> held_;
  std::vector<uint64_t> offsets_;
  std::vector<std::vector<uint64_t>> copies_;  // by tensor, where the matrices of its quantised copy lie
  uint64_t bytes_ = 0;
};

}  // namespace tessera::bus
