#include "bus/registration/digest_choice.h"

#include <span>

#include "base/bytes.h"

namespace tessera::bus {

DigestMode weaker(DigestMode a, DigestMode b) {
  for (const DigestMode mode : {DigestMode::kOff, DigestMode::kSampled})
    if (a == mode || b == mode) return mode;
  return DigestMode::kFull;
}

SampleSeed session_sample(DigestMode choice, bool delta, std::string_view session) {
  // With deltas, digests also tell whether the receiver holds what a delta was made from, which a sample could not.
  if (choice != DigestMode::kSampled || delta) return std::nullopt;
  return ByteReader(std::as_bytes(std::span(session)), "a session").get<uint64_t>();
}

}  // namespace tessera::bus
