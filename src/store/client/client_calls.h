// Shared by Client's two halves: client.cc runs on the callers' threads, client_loop.cc on the client's thread.
#pragma once

#include "base/fail.h"
#include "base/log.h"
#include "base/mutex.h"
#include "store/client/client.h"

namespace tessera::store {

// Errors that a retry does not cure: calls fail immediately.
inline bool lasting(ErrorCode code) {
  return code == ErrorCode::kMismatch || code == ErrorCode::kPermissionDenied;
}

// A request in progress. The caller waits for it; the client's thread ends it.
struct Client::Call {
  uint64_t id = 0;
  std::string what;  // "put 'a/b/c'"
  std::vector<std::byte> request;
  std::function<void(ByteReader&)> on_reply;  // on the client's thread
  bool grants = false;                        // a lease, which is useless if nobody waits for it any more

  Mutex mutex;
  CondVar changed;
  bool done GUARDED_BY(mutex) = false;
  Status status GUARDED_BY(mutex);
  bool abandoned = false;  // for the client's thread: memory_ still needs the reply

  void end(Status outcome) {
    {
      const MutexLock lock(mutex);
      if (std::exchange(done, true)) return;
      status = std::move(outcome);
    }
    changed.notify_all();
  }
};

struct Client::Watching {
  uint64_t id = 0;
  std::string prefix;
  int64_t next = 0;  // for the client's thread: the first revision that was not delivered yet
  WatchCallback callback;
  Mutex delivering;  // held while the callback runs
  std::atomic<bool> ended{false};

  void deliver(const WatchUpdate& update) {
    const MutexLock lock(delivering);
    if (ended) return;
    try {
      callback(update);
    } catch (...) {
      log_event(LogLevel::err, "callback.failed", {}, "the callback of a watch of '{}' failed: {}"_message, prefix,
                status_of_current_exception().message());
    }
    if (update.type != WatchUpdate::Type::kEvents) ended = true;
  }
};

}  // namespace tessera::store
