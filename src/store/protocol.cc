#include "store/protocol.h"

#include <random>

#include "tessera/version.h"

namespace tessera::store {

std::string_view release() {
  return kVersion;
}

uint64_t random_id() {
  std::random_device random;
  return (uint64_t{random()} << 32) | random() | 1;
}

}  // namespace tessera::store
