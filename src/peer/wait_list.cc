#include "peer/wait_list.h"

#include "base/metrics.h"

namespace tessera::bus {

WaitList::Entry::Entry(WaitList& list) : list_(list), since_(Clock::steady().now()) {
  Metrics::process().waits.add(1);
  const std::lock_guard lock(list_.mutex_);
  list_.entries_.push_back(this);
}

WaitList::Entry::~Entry() {
  Metrics::process().waits.add(-1);
  const std::lock_guard lock(list_.mutex_);
  list_.entries_.remove(this);
}

void WaitList::Entry::set(std::string text) {
  const std::lock_guard lock(list_.mutex_);
  text_ = std::move(text);
}

std::vector<Wait> WaitList::now() const {
  const std::lock_guard lock(mutex_);
  std::vector<Wait> waits;
  for (const Entry* entry : entries_)
    if (!entry->text_.empty())
      waits.push_back({.text = entry->text_, .microseconds = microseconds_since(entry->since_)});
  return waits;
}

int64_t microseconds_since(TimePoint then) {
  return std::chrono::duration_cast<std::chrono::microseconds>(Clock::steady().now() - then).count();
}

}  // namespace tessera::bus
