#include "base/fork_guard.h"

#include <pthread.h>

#include <atomic>

namespace tessera {
namespace {

std::atomic<uint64_t> forks{0};

}  // namespace

uint64_t fork_count() {
  static const int registered =
      ::pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  static_cast<void>(registered);
  return forks.load(std::memory_order_relaxed);
}

}  // namespace tessera
