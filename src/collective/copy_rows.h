// How an owner's published rows get into the gathered matrix: copied, cast or decoded.
#pragma once

#include "collective/gather.h"
#include "tessera/quantize.h"

namespace tessera::collective {

// Reads `from` once and writes its rows of `to`, the whole matrix, once; past the caches if the matrix is larger than
// the second-level cache: stream_fence() before telling anybody.
void copy_rows(const PublishedWeight& weight, const PublishedRows& from, const MatrixMemory& to);

}  // namespace tessera::collective
