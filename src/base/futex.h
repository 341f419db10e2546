// Sleeping on a word that processes share, until another says that it has changed (futex(2)).
#pragma once

#include <atomic>
#include <cstdint>

#include "base/clock.h"

namespace tessera {

// Sleeps while `word` holds `expected`, until it is woken or the deadline has passed. May return early: look again.
void futex_wait(const std::atomic<uint32_t>& word, uint32_t expected, const Deadline& deadline);

// Wakes everyone, of every process, who sleeps on `word`.
void futex_wake(const std::atomic<uint32_t>& word);

}  // namespace tessera
