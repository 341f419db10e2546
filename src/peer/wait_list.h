// The waits of a process's threads outside of a batch's operations: for ranks to join, to register or to attach.
#pragma once

#include <list>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "peer/report.h"

namespace tessera {

// Thread-safe.
class WaitList {
  struct Item {
    TimePoint since;
    std::string text;
  };

 public:
  // One wait. It lasts as long as this object.
  class Entry {
   public:
    explicit Entry(WaitList& list);
    ~Entry();
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;
    void set(std::string text);  // "trainer/2 to register batch policy of pair weights"

   private:
    WaitList& list_;
    std::list<Item>::iterator item_;
  };

  std::vector<Wait> now() const;  // the current waits, in the order in which they began

 private:
  mutable Mutex mutex_;
  std::list<Item> items_ GUARDED_BY(mutex_);
};

// The time since `then`, for Wait::microseconds.
int64_t microseconds_since(TimePoint then);

}  // namespace tessera
