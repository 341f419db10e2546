// Mistakes that a build with tests can be told to make, one at a time, so that a test can show that it would find them.
// Each is made at one place. Other builds have no way to ask for one, and no branch for it.
#pragma once

#include <atomic>
#include <cstdint>

namespace tessera {

enum class Mutation : uint8_t {
  kNone,
  kLocalAmax,       // a rank quantises with the amaxes of matrices that it has found, not with all ranks'
  kLocalBlockAmax,  // likewise of blocks that it does not hold whole
  kSpoiledCode,     // a byte of a wire piece is not what was digested: of a code,
  kSpoiledScale,    // of a scale,
  kSpoiledAmax,     // or of an amax
  kStaleBase,       // a delta is taken on top of whatever a receiver holds
};

#ifdef TESSERA_MUTATIONS
inline std::atomic<Mutation>& mutation() {
  static std::atomic<Mutation> asked{Mutation::kNone};
  return asked;
}
inline bool mutated(Mutation which) {
  return mutation().load(std::memory_order_relaxed) == which;
}
#else
constexpr bool mutated(Mutation) {
  return false;
}
#endif

}  // namespace tessera
