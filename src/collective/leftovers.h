// Memory that a rank has shown to its group and wants no more, while other ranks may still read it.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "base/fork_guard.h"
#include "base/mutex.h"
#include "base/process.h"
#include "collective/shared/page.h"
#include "collective/shared/shared_pages.h"

namespace tessera::collective {

// Who of a group may still read the memory of this rank. Outlives the group. Thread-safe.
class Readers {
 public:
  Readers(int rank, std::vector<std::shared_ptr<SharedPages>> memory, std::vector<Page> pages,
          std::vector<Incarnation> processes);

  // Tells whether no other rank does: each has said so by Word::kDone, or has died, which is looked at once a second.
  // Never waits.
  bool none() const;
  // Tells the others that this rank reads nothing of theirs any more.
  void tell_done() const;

 private:
  const int rank_;
  const std::vector<std::shared_ptr<SharedPages>> memory_;
  const std::vector<Page> pages_;
  const std::vector<Incarnation> processes_;
  const ForkGuard process_;
  mutable std::atomic<TimePoint> next_look_{TimePoint()};  // at processes, which takes system calls
};

// Thread-safe. A forked child keeps its copy of it for ever.
class Leftovers {
 public:
  static Leftovers& of_process();

  // Keeps memory as long as one of the readers may read it.
  void keep(std::shared_ptr<const Readers> readers, std::shared_ptr<const void> memory);
  // Frees what nobody reads any more. To be called now and then; never waits, and costs a load where nothing is kept.
  void free_unread();
  size_t count() const { return count_.load(std::memory_order_relaxed); }

 private:
  struct Kept {
    std::shared_ptr<const Readers> readers;
    std::shared_ptr<const void> memory;
  };

  const ForkGuard process_;
  std::atomic<size_t> count_{0};
  Mutex mutex_;
  std::vector<Kept> kept_ GUARDED_BY(mutex_);
};

}  // namespace tessera::collective
