#include "checkpoint/region_digest.h"

#include <cstdint>

#include "base/fail.h"
#include "checkpoint/region_checks.h"
#include "checkpoint/region_runs.h"
#include "tessera/checkpoint.h"

namespace tessera::checkpoint {

Digest digest_of_region(DType dtype, const Shape& shape, const Region& region, std::span<const std::byte> packed) {
  require_inside({.name = {}, .dtype = dtype, .shape = shape}, region, "digest");
  TESSERA_CHECK_EQ(static_cast<int64_t>(packed.size()), bytes_of(dtype, region.size()));
  Digest digest{.elements = static_cast<uint64_t>(region.size())};
  for_each_byte_run(dtype, shape, region, "digest", [&](int64_t begin, int64_t bytes) {
    digest_bytes(digest, static_cast<uint64_t>(begin), packed.data(), static_cast<size_t>(bytes));
    packed = packed.subspan(static_cast<size_t>(bytes));
  });
  return digest;
}

}  // namespace tessera::checkpoint
