// What threads of a process wait for outside of a batch's operations: ranks that are to join, to register or to attach.
#pragma once

#include <list>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.h"
#include "peer/report.h"

namespace tessera::bus {

// Thread-safe.
class WaitList {
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
    friend class WaitList;
    WaitList& list_;
    const TimePoint since_;
    std::string text_;  // guarded by the list's mutex_
  };

  std::vector<Wait> now() const;  // in the order in which they began

 private:
  mutable std::mutex mutex_;
  std::list<const Entry*> entries_;  // guarded by mutex_
};

// How long it has lasted, as a Report says it.
int64_t microseconds_since(TimePoint then);

}  // namespace tessera::bus
