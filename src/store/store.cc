// What every Store has in common, built on its own calls.
#include "tessera/store.h"

#include <algorithm>

#include "base/clock.h"
#include "base/fail.h"
#include "base/mutex.h"
#include "store/limits.h"

namespace tessera {
namespace {

constexpr Store::Timeout kListPiece = std::chrono::seconds(1);

// What a watch has brought and wait_for() has not yet taken.
struct Feed {
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

void apply_events(const std::vector<StoreEvent>& events, StoreView& view) {
  for (const StoreEvent& event : events) {
    if (event.type == StoreEvent::Type::kPut) {
      view.insert_or_assign(event.kv.key, event.kv);
    } else {
      view.erase(event.kv.key);
    }
  }
}

}  // namespace

SwapResult Store::put_if_absent(std::string_view key, std::string_view value, PutOptions options, Timeout timeout) {
  return compare_and_set(key, 0, value, options, timeout);
}

SwapResult Store::compare_and_set(std::string_view key, int64_t expected, std::string_view value, PutOptions options,
                                  Timeout timeout) {
  StoreTransaction transaction;
  transaction.compares.push_back({.key = std::string(key), .mod_revision = expected});
  transaction.operations.push_back(
      {.type = StoreOperation::Type::kPut, .key = std::string(key), .value = std::string(value), .options = options});
  TransactionResult result = transact(transaction, timeout);
  SwapResult swap{.stored = result.succeeded, .current = {}};
  if (!result.current.empty()) swap.current = std::move(result.current.begin()->second);
  return swap;
}

StoreView Store::wait_for(std::string_view prefix, const Predicate& predicate, Timeout timeout,
                          const std::stop_token& stop) {
  const Deadline deadline = Deadline::after(timeout);
  const auto interrupted = [&] {
    fail(ErrorCode::kCancelled, "store {}: the wait for '{}*' was interrupted"_message, url(), prefix);
  };
  const auto list = [&] {  // in pieces: a stop does not wait for a store that does not answer
    while (true) {
      try {
        return this->range(prefix, std::min<Timeout>(deadline.left(), kListPiece));
      } catch (const Error& error) {
        const bool waits = error.code() == ErrorCode::kDeadlineExceeded || error.code() == ErrorCode::kUnavailable;
        if (!waits || deadline.passed()) throw;
        if (stop.stop_requested()) interrupted();
      }
    }
  };
  while (true) {
    StoreRange range = list();
    if (predicate(range.items)) return std::move(range.items);
    const auto feed = std::make_shared<Feed>();
    const auto watch =
        this->watch(prefix, range.revision + 1, [feed](const WatchUpdate& update) { feed->add(update); });
    for (bool ended = false; !ended;) {
      std::vector<StoreEvent> events;
      {
        const MutexLock lock(feed->mutex);
        const auto changed = [&]() REQUIRES(feed->mutex) { return !feed->events.empty() || feed->ended; };
        if (!feed->changed.wait_until(feed->mutex, stop, deadline, changed)) {
          if (stop.stop_requested()) interrupted();
          fail(ErrorCode::kDeadlineExceeded,
               "store {}: what was awaited under '{}*' did not come within {:.3g} s; {} "
               "keys are there"_message,
               url(), prefix, std::chrono::duration<double>(timeout).count(), range.items.size());
        }
        events.swap(feed->events);
        ended = feed->ended;
      }
      apply_events(events, range.items);
      if (!ended && predicate(range.items)) return std::move(range.items);
    }
  }
}

std::string store_key(std::string_view name_space, std::string_view component, std::string_view key) {
  for (const std::string_view part : {name_space, component}) {
    if (part.empty() || part.find('/') != std::string_view::npos)
      fail(ErrorCode::kInvalidArgument, "'{}' cannot be part of a store key: it is empty or has a '/'"_message, part);
  }
  if (key.empty()) fail(ErrorCode::kInvalidArgument, "the key in '{}/{}' is empty"_message, name_space, component);
  std::string joined = fmt::format("{}/{}/{}", name_space, component, key);
  store::check_key(joined);
  return joined;
}

}  // namespace tessera
