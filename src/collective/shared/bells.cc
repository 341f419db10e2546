#include "collective/shared/bells.h"

#include "base/futex.h"
#include "base/rounding.h"

namespace tessera::collective {

size_t Bells::bytes_for(int ranks) {
  return round_up(static_cast<size_t>(ranks) * sizeof(Bell), size_t{4096});
}

Bells::Bells(std::shared_ptr<SharedPages> pages, int rank, int ranks)
    : pages_(std::move(pages)), rank_(rank), ranks_(ranks) {}

Bells::Bell& Bells::bell(int rank) const {
  return reinterpret_cast<Bell*>(pages_->data())[rank];
}

void Bells::ring(Bell& bell) {
  bell.rings.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(bell.rings);
}

// Sequentially consistent on both sides: either the sleeper sees the change before it sleeps, or its announcement is
// seen here.
void Bells::ring_sleepers() {
  for (int rank = 0; rank < ranks_; ++rank)
    if (bell(rank).sleepers.load(std::memory_order_seq_cst) != 0) ring(bell(rank));
}

void Bells::ring_own() {
  ring(bell(rank_));
}

bool Bells::wait(const std::function<bool()>& ready, const Deadline& deadline) {
  struct Announcement {
    explicit Announcement(Bell& of) : bell(of) { bell.sleepers.fetch_add(1, std::memory_order_seq_cst); }
    ~Announcement() { bell.sleepers.fetch_sub(1, std::memory_order_seq_cst); }
    Announcement(const Announcement&) = delete;
    Announcement& operator=(const Announcement&) = delete;
    Bell& bell;
  };
  if (ready()) return true;
  Bell& own = bell(rank_);
  const Announcement announcement(own);
  for (;;) {
    const uint32_t rings = own.rings.load(std::memory_order_seq_cst);
    if (ready()) return true;
    if (deadline.passed()) return false;
    futex_wait(own.rings, rings, deadline);
  }
}

}  // namespace tessera::collective
