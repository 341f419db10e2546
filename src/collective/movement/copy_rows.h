// How an owner's published rows get into the gathered matrix: copied, cast or decoded.
#pragma once

#include <cstdint>

#include "collective/movement/gather.h"
#include "tessera/quantize.h"

namespace tessera::collective {

// Whether matrices of so many bytes that are written in one go are better written past the caches: they are larger than
// the second-level cache.
bool goes_past_caches(int64_t bytes);

// Reads `from` once and writes its rows of `to`, the whole matrix, once. `past_caches`: stream_fence() before telling
// anybody.
void copy_rows(const PublishedWeight& weight, const PublishedRows& from, const MatrixMemory& to, bool past_caches);

}  // namespace tessera::collective
