// What threads of a process wait for outside of a batch's operations: ranks that are to join, to register or to attach.
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
  // One wait, while it lives.
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

  std::vector<Wait> now() const;  // in the order in which they began

 private:
  mutable Mutex mutex_;
  std::list<Item> items_ GUARDED_BY(mutex_);
};

// How long it has lasted, as a Report says it.
int64_t microseconds_since(TimePoint then);

}  // namespace tessera
