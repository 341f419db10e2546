#include "codec/parallel.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "base/fail.h"
#include "base/process.h"
#include "base/thread.h"

namespace tessera::codec {
namespace {

size_t threads_for(size_t n, size_t bytes, Parallel parallel) {
  if (parallel.threads < 0)
    fail(ErrorCode::kInvalidArgument, "threads is {}: give 1 or more, or 0 for as many as may run"_message,
         parallel.threads);
  const size_t most = static_cast<size_t>(parallel.threads == 0 ? usable_cpus() : parallel.threads);
  return std::min({most, n, bytes / kBytesPerThread + 1});
}

}  // namespace

void for_each(size_t n, size_t bytes, Parallel parallel, const std::function<void(size_t)>& body) {
  const size_t threads = threads_for(n, bytes, parallel);
  std::atomic<size_t> next = 0;
  const auto work = [&] {
    for (size_t i = next++; i < n; i = next++) body(i);
  };
  std::vector<std::thread> others;
  for (size_t t = 1; t < threads; ++t) {
    try {
      others.push_back(start_thread(fmt::format("tessera-quant-{}", t), work));
    } catch (const Error&) {
      break;  // then the existing threads do it
    }
  }
  work();
  for (std::thread& thread : others) thread.join();
}

}  // namespace tessera::codec
