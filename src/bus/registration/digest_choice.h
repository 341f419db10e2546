// How the digests of a session are made: what its ranks have asked for, and the seed of its samples.
#pragma once

#include <string_view>

#include "base/fields.h"
#include "codec/simd/digest_sample.h"
#include "tessera/bus.h"

namespace tessera::bus {

template <typename Fields, typename Digests>
void digest_field(Fields& f, Digests& mode) {
  DigestMode::Value value = mode.value();
  f("digest", value, DigestMode::kSampled);
  if constexpr (kFills<Fields>) mode = value;
}

// The choice that holds if two ranks have made these: off, else sampled, else full.
DigestMode weaker(DigestMode a, DigestMode b);

// The seed of a session's samples; none if its digests are full or off. It is drawn from the session's name, which
// nobody knows before both sides have registered. REQUIRES: the name has 8 bytes at least
SampleSeed session_sample(DigestMode choice, bool delta, std::string_view session);

}  // namespace tessera::bus
