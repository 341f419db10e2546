// A loop over independent pieces of work, shared among threads that live only for the loop.
#pragma once

#include <cstddef>
#include <functional>

#include "tessera/quantize.h"

namespace tessera::codec {

// With fewer bytes, another thread costs more than it gains.
inline constexpr size_t kBytesPerThread = size_t{1} << 20;

// Calls body(0), ..., body(n - 1), each once, on this thread and on at most parallel.threads - 1 others; fewer if there
// are only few `bytes` to process. `body` must not throw.
void for_each(size_t n, size_t bytes, Parallel parallel, const std::function<void(size_t)>& body);

}  // namespace tessera::codec
