// Sleeping on a word in shared memory until another process says that it has changed (futex(2)).
#pragma once

#include <atomic>
#include <cstdint>

#include "base/clock.h"

namespace tessera {

// Sleeps while `word` holds `expected`, until woken or until the deadline. May return early: check again.
void futex_wait(const std::atomic<uint32_t>& word, uint32_t expected, const Deadline& deadline);

// Wakes every thread of every process that sleeps on `word`.
void futex_wake(const std::atomic<uint32_t>& word);

}  // namespace tessera
