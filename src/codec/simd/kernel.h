// Which variant of the codec's kernels runs: the best SIMD target that this build has and this CPU supports, or
// "scalar", the plain C++ reference, which always exists. All variants give the same bits.
//
// TESSERA_FORCE_KERNEL chooses a variant for the process; ForcedKernel chooses one temporarily, in tests. A function
// that looks up a kernel (cast_row, digest_bytes, ...) takes the variant active at that moment. Thread-safe.
#pragma once

#include <string_view>
#include <vector>

namespace tessera {

// The names of the variants that can be forced, best first, scalar last: {"AVX2", "SSE4", "SSSE3", "scalar"}.
std::vector<std::string_view> available_kernels();

// Throws Error(kInvalidArgument) that lists the available ones if TESSERA_FORCE_KERNEL names another one.
std::string_view active_kernel();

// Makes a variant the active one on all threads as long as the object lives. For tests and benchmarks. Objects may
// nest, on one thread.
class ForcedKernel {
 public:
  // Ignores case. Throws Error(kInvalidArgument) that lists the available ones if `name` is another one.
  explicit ForcedKernel(std::string_view name);
  ~ForcedKernel();
  ForcedKernel(const ForcedKernel&) = delete;
  ForcedKernel& operator=(const ForcedKernel&) = delete;

 private:
  const void* previous_;
};

}  // namespace tessera
