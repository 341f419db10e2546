#include "base/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace tessera {

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

// FUTEX_WAIT_BITSET takes an absolute time on Deadline's clock; FUTEX_WAIT would take the time that is left.
void futex_wait(const std::atomic<uint32_t>& word, uint32_t expected, const Deadline& deadline) {
  const bool endless = deadline.when() == TimePoint::max();
  const Duration when = deadline.when().time_since_epoch();
  if (when < Duration::zero()) return;
  const auto whole = std::chrono::duration_cast<std::chrono::seconds>(when);
  const timespec end{.tv_sec = whole.count(), .tv_nsec = static_cast<long>((when - whole).count())};
  ::syscall(SYS_futex, &word, FUTEX_WAIT_BITSET, expected, endless ? nullptr : &end, nullptr, FUTEX_BITSET_MATCH_ANY);
}

void futex_wake(const std::atomic<uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace tessera
