// A count beside what one thread writes and others read meanwhile, maybe those of other processes: odd while it writes.
// Who has read the same even count before and behind has read what was written before that count.
#pragma once

#include <atomic>
#include <cstdint>

namespace tessera::collective {

// GCC's thread sanitizer knows no fences, and says so; words that are atomic need none to be free of races.
#pragma GCC diagnostic push
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wtsan"
#endif

// Others see the count behind all that this thread has written, and before all that it writes next. `word`: of 8
// bytes, aligned.
inline void set_sequence(uint64_t& word, uint64_t count) {
  std::atomic_thread_fence(std::memory_order_release);
  std::atomic_ref(word).store(count, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
}

// What this thread reads from now on is not older than what it has read.
inline void read_in_order() {
  std::atomic_thread_fence(std::memory_order_acquire);
}

#pragma GCC diagnostic pop

}  // namespace tessera::collective
