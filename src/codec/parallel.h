// A loop over independent pieces of work, shared among threads that live as long as it does.
#pragma once

#include <cstddef>
#include <functional>

#include "tessera/quantize.h"

namespace tessera::codec {

// Bytes below which a thread more costs what it gains.
inline constexpr size_t kBytesPerThread = size_t{1} << 20;

// Calls body(0), ..., body(n - 1), each once, on this thread and on at most parallel.threads - 1 others, of which there
// are the fewer the less `bytes` there are to go through. `body` must not throw.
void for_each(size_t n, size_t bytes, Parallel parallel, const std::function<void(size_t)>& body);

}  // namespace tessera::codec
