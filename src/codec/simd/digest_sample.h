// Digests of one block in sixteen, other ones in each version: docs/formats/digest.md, "Sampled".
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "codec/simd/digest.h"

namespace tessera {

// What the samples of a session, or of one of its versions, are drawn from. None: digests are full.
using SampleSeed = std::optional<uint64_t>;

SampleSeed seed_of_version(const SampleSeed& session, int64_t version);

// Which blocks of a tensor's image are chosen. A value; thread-safe.
class DigestSample {
 public:
  static constexpr uint64_t kOneIn = 16;

  DigestSample(uint64_t version_seed, uint32_t tensor);  // its ordinal in the batch

  // The number of the block that is chosen of kOneIn * group and the following ones.
  uint64_t block(uint64_t group) const;
  // Whether a chosen block has any of the bytes [begin, end) of the image.
  bool touches(uint64_t begin, uint64_t end) const;

 private:
  uint64_t seed_;
};

// As digest_rows(), of the bytes that lie in chosen blocks. It reads no others.
void digest_sampled_rows(Digest& digest, const DigestSample& sample, uint64_t image_offset, uint64_t image_stride,
                         const std::byte* data, ptrdiff_t data_stride, size_t row_bytes, size_t rows);

}  // namespace tessera
