#include "store/prefix_follower.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/fail.h"
#include "base/mutex.h"

namespace tessera::store {
namespace {

constexpr Store::Timeout kListPiece = std::chrono::seconds(1);

void apply_events(std::vector<StoreEvent> events, StoreView& view) {
  for (StoreEvent& event : events) {
    if (event.type == StoreEvent::Type::kPut) {
      std::string key = event.kv.key;
      view.insert_or_assign(std::move(key), std::move(event.kv));
    } else {
      view.erase(event.kv.key);
    }
  }
}

}  // namespace

// Events that the watch has brought and wait() has not taken yet.
struct PrefixFollower::Feed {
  Mutex mutex;
  StoppableCondVar changed;
  std::vector<StoreEvent> events GUARDED_BY(mutex);
  bool ended GUARDED_BY(mutex) = false;

  void add(const WatchUpdate& update) {
    {
      const MutexLock lock(mutex);
      events.insert(events.end(), update.events.begin(), update.events.end());
      ended = ended || update.type != WatchUpdate::Type::kEvents;
    }
    changed.notify_one();
  }
};

PrefixFollower::PrefixFollower(Store& store, std::string prefix) : store_(store), prefix_(std::move(prefix)) {}

PrefixFollower::~PrefixFollower() = default;

// In short waits: a stop must not wait for a store that does not answer.
void PrefixFollower::list(const std::stop_token& stop, Store::Timeout timeout) {
  const Deadline deadline = Deadline::after(timeout);
  while (true) {
    try {
      range_ = store_.range(prefix_, std::min<Store::Timeout>(deadline.left(), kListPiece));
      return;
    } catch (const Error& error) {
      const bool waits = error.code() == ErrorCode::kDeadlineExceeded || error.code() == ErrorCode::kUnavailable;
      if (!waits || deadline.passed()) throw;
      if (stop.stop_requested())
        fail(ErrorCode::kCancelled, "store {}: the wait for '{}*' was interrupted"_message, store_.url(), prefix_);
    }
  }
}

void PrefixFollower::wait(const Store::Predicate& predicate, Store::Timeout timeout, const std::stop_token& stop) {
  const Deadline deadline = Deadline::after(timeout);
  bool ended = false;
  while (true) {
    if (!feed_) {
      list(stop, deadline.left());
      if (predicate(range_.items)) return;
      const auto feed = std::make_shared<Feed>();
      watch_ = store_.watch(prefix_, range_.revision + 1, [feed](const WatchUpdate& update) { feed->add(update); });
      feed_ = feed;
    } else if (predicate(range_.items)) {
      return;
    }
    std::vector<StoreEvent> events;
    {
      const MutexLock lock(feed_->mutex);
      const auto changed = [&]() REQUIRES(feed_->mutex) { return !feed_->events.empty() || feed_->ended; };
      if (!feed_->changed.wait_until(feed_->mutex, stop, deadline, changed)) {
        if (stop.stop_requested())
          fail(ErrorCode::kCancelled, "store {}: the wait for '{}*' was interrupted"_message, store_.url(), prefix_);
        fail(ErrorCode::kDeadlineExceeded,
             "store {}: the awaited keys under '{}*' did not appear within {:.3g} s; {} keys are there"_message,
             store_.url(), prefix_, to_seconds(timeout), range_.items.size());
      }
      events.swap(feed_->events);
      ended = feed_->ended;
    }
    apply_events(std::move(events), range_.items);
    if (ended) list_again();
  }
}

void PrefixFollower::list_again() {
  watch_.reset();
  feed_.reset();
}

}  // namespace tessera::store
