// Which variant of the codec's kernels runs: the best SIMD target that this build has and this CPU can, or "scalar",
// the plain C++ reference that is always there. All variants give the same bits.
//
// TESSERA_FORCE_KERNEL chooses one for the process; ForcedKernel chooses one for a while, in tests. Whatever looks up a
// kernel (cast_row, digest_bytes, ...) takes the variant active at that moment. Thread-safe.
#pragma once

#include <string_view>
#include <vector>

namespace tessera {

// Names by which a variant can be forced, best first, scalar last: {"AVX2", "SSE4", "SSSE3", "scalar"}.
std::vector<std::string_view> available_kernels();

// Throws Error(kInvalidArgument) that lists the available ones when TESSERA_FORCE_KERNEL names none of them.
std::string_view active_kernel();

// Makes a variant the active one on all threads for as long as it lives. For tests and benchmarks; they may nest, on
// one thread.
class ForcedKernel {
 public:
  // Any case. Throws Error(kInvalidArgument) that lists the available ones when it is none of them.
  explicit ForcedKernel(std::string_view name);
  ~ForcedKernel();
  ForcedKernel(const ForcedKernel&) = delete;
  ForcedKernel& operator=(const ForcedKernel&) = delete;

 private:
  const void* previous_;
};

}  // namespace tessera
