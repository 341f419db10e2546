// Sleeping until a peer has changed its page. Each rank has a bell in one page that all write: who changes a page rings
// the bells whose ranks have announced that they sleep. A bell carries nothing: whoever wakes looks again.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "base/clock.h"
#include "collective/shared/shared_pages.h"

namespace tessera::collective {

// Thread-safe.
class Bells {
 public:
  static size_t bytes_for(int ranks);
  Bells(std::shared_ptr<SharedPages> pages, int rank, int ranks);

  // After a sequentially consistent store to the own page.
  void ring_sleepers();
  // For what only this process knows.
  void ring_own();
  // Sleeps until `ready`, which reads with sequentially consistent loads and may throw, or until the deadline: false.
  bool wait(const std::function<bool()>& ready, const Deadline& deadline);

 private:
  struct alignas(64) Bell {
    std::atomic<uint32_t> rings;
    std::atomic<uint32_t> sleepers;  // threads that have announced sleep
  };
  Bell& bell(int rank) const;
  static void ring(Bell& bell);

  std::shared_ptr<SharedPages> pages_;
  int rank_;
  int ranks_;
};

}  // namespace tessera::collective
