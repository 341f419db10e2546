#include "peer/wait_list.h"

#include "base/metrics.h"

namespace tessera {

WaitList::Entry::Entry(WaitList& list) : list_(list) {
  Metrics::process().waits.add(1);
  const MutexLock lock(list_.mutex_);
  item_ = list_.items_.insert(list_.items_.end(), {.since = Clock::steady().now(), .text = {}});
}

WaitList::Entry::~Entry() {
  Metrics::process().waits.add(-1);
  const MutexLock lock(list_.mutex_);
  list_.items_.erase(item_);
}

void WaitList::Entry::set(std::string text) {
  const MutexLock lock(list_.mutex_);
  item_->text = std::move(text);
}

std::vector<Wait> WaitList::now() const {
  const MutexLock lock(mutex_);
  std::vector<Wait> waits;
  for (const Item& item : items_)
    if (!item.text.empty()) waits.push_back({.text = item.text, .microseconds = microseconds_since(item.since)});
  return waits;
}

int64_t microseconds_since(TimePoint then) {
  return std::chrono::duration_cast<std::chrono::microseconds>(Clock::steady().now() - then).count();
}

}  // namespace tessera
