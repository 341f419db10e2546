// Processes the blocks of one route: copies, casts or accumulates, and digests on the way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "codec/simd/cast.h"
#include "codec/simd/digest.h"
#include "codec/simd/digest_sample.h"
#include "codec/simd/reduce.h"
#include "exec/walk/route.h"
#include "exec/walk/walk.h"

namespace tessera {

// Digests the source's rows of a block in place: all of them, or the blocks of `sample`. (The caller sets
// Digest::elements.)
void digest_block(Digest& digest, const Block& block, const std::byte* src, int64_t atom_bytes,
                  const DigestSample* sample = nullptr);

// How a part of a route is digested on the way: all of it, the blocks of a sample, or nothing. A value.
class PartDigest {
 public:
  PartDigest() = default;  // nothing
  // `seed`: of the version's sample; without one, everything is digested. `image`: of the route.
  PartDigest(const SampleSeed& seed, uint32_t tensor, const ImageRange& image)
      : sample_(seed ? std::optional(DigestSample(*seed, tensor)) : std::nullopt),
        any_(!sample_ || sample_->touches(image.begin, image.end)) {}

  bool any() const { return any_; }
  // The arguments of digest_block() and BlockKernel::run(). The sample lives as long as this object.
  Digest* into(Digest& digest) const { return any_ ? &digest : nullptr; }
  const DigestSample* sample() const { return sample_ ? &*sample_ : nullptr; }

 private:
  std::optional<DigestSample> sample_;
  bool any_ = false;
};

// Chosen once for each route. Immutable, hence thread-safe.
class BlockKernel {
 public:
  enum class Store : uint8_t {
    kStream,  // bypasses the caches: for destinations that will not be read soon; the caller calls stream_fence()
    kCache,   // for staging
  };

  // Throws Error(kInvalidArgument) for a cast or reduction that does not exist.
  BlockKernel(DType from, DType to, Combine combine, ReduceOp op, Store store);

  // Offsets count from `src`, `dst` and the image's start. If `digest` is null, nothing is digested; if `sample` is
  // not, only its blocks are. (The caller sets Digest::elements.)
  void run(const Block& block, const std::byte* src, std::byte* dst, Digest* digest,
           const DigestSample* sample = nullptr) const;

  int64_t source_bytes() const { return src_bytes_; }   // of an atom
  bool copies() const { return kind_ == Kind::kCopy; }  // bits are copied unchanged

 private:
  enum class Kind : uint8_t { kCopy, kCast, kAccumulate };

  void copy(const Block& block, const std::byte* src, std::byte* dst, Digest* digest, const DigestSample* sample) const;
  void convert(const Block& block, const std::byte* src, std::byte* dst, Digest* digest,
               const DigestSample* sample) const;
  // Prefetches `ahead` bytes beyond the current position in each row; 0: the next row.
  void convert_rows(const Block& block, const std::byte* src, std::byte* dst, int64_t ahead) const;
  void convert_atoms(const Block& block, const std::byte* src, std::byte* dst) const;

  Kind kind_ = Kind::kCopy;
  Store store_;
  uint8_t src_bytes_;
  uint8_t dst_bytes_;
  void (*convert_)(const void*, void*, size_t) = nullptr;       // kCast, kAccumulate
  void (*convert_long_)(const void*, void*, size_t) = nullptr;  // kCast: for rows that are worth streaming
};

}  // namespace tessera
