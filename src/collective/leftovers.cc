#include "collective/leftovers.h"

#include <algorithm>
#include <utility>

namespace tessera::collective {

Readers::Readers(int rank, std::vector<std::shared_ptr<SharedPages>> memory, std::vector<Page> pages,
                 std::vector<Incarnation> processes)
    : rank_(rank), memory_(std::move(memory)), pages_(std::move(pages)), processes_(std::move(processes)) {}

bool Readers::none() const {
  if (!process_.here()) return false;
  std::vector<size_t> reading;
  for (size_t rank = 0; rank < pages_.size(); ++rank)
    if (rank != static_cast<size_t>(rank_) &&
        pages_[rank].word(Word::kDone, kWholeRank).load(std::memory_order_acquire) == 0)
      reading.push_back(rank);
  if (reading.empty()) return true;
  const TimePoint now = Clock::steady().now();
  if (now < next_look_.load(std::memory_order_relaxed)) return false;
  next_look_.store(now + std::chrono::seconds(1), std::memory_order_relaxed);
  return std::ranges::all_of(reading, [this](size_t rank) { return liveness_of(processes_[rank]) == Liveness::kDead; });
}

void Readers::tell_done() const {
  if (process_.here())
    pages_[static_cast<size_t>(rank_)].word(Word::kDone, kWholeRank).store(1, std::memory_order_release);
}

Leftovers& Leftovers::of_process() {
  static auto* const leftovers = new Leftovers;  // what is kept when the process ends goes with it
  return *leftovers;
}

void Leftovers::keep(std::shared_ptr<const Readers> readers, std::shared_ptr<const void> memory) {
  if (!process_.here() || readers->none()) return;
  const MutexLock lock(mutex_);
  kept_.push_back({std::move(readers), std::move(memory)});
  count_.store(kept_.size(), std::memory_order_relaxed);
}

void Leftovers::free_unread() {
  if (count_.load(std::memory_order_relaxed) == 0 || !process_.here()) return;
  std::vector<Kept> freed;  // once the lock is open: it may be anything
  const MutexLock lock(mutex_);
  const auto read = std::ranges::stable_partition(kept_, [](const Kept& kept) { return !kept.readers->none(); });
  std::ranges::move(read, std::back_inserter(freed));
  kept_.erase(read.begin(), read.end());
  count_.store(kept_.size(), std::memory_order_relaxed);
}

}  // namespace tessera::collective
