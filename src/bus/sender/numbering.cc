#include "bus/sender/numbering.h"

#include <algorithm>
#include <utility>

namespace tessera::bus {

void Numbering::begin(int64_t version, bool given) {
  newest_ = std::max(newest_, version);
  given_ = given;
}

bool Numbering::meet(int64_t newest) {
  if (std::exchange(met_, true) && !follows_) return false;
  follows_ = follows_ || newest > newest_;
  newest_ = std::max(newest_, newest);
  tried_ = std::max(tried_.load(), newest);
  return true;
}

void Numbering::hear(int64_t version, bool must) {
  if (follows_ || must) newest_ = std::max(newest_, version - 1);
}

}  // namespace tessera::bus
