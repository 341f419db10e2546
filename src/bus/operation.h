// The outcome of one send or recv, shared between the user's Handle and the batch that works on it.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>

#include "base/clock.h"
#include "tessera/bus.h"
#include "tessera/error.h"

namespace tessera::bus {

// Ends exactly once. Thread-safe.
class Operation {
 public:
  // `sample` gives the progress while the operation runs, `cancel` asks the batch to end it; both may be called from
  // any thread until the operation has ended, and are dropped then.
  struct Hooks {
    std::function<Progress()> sample;
    std::function<bool()> cancel;
  };
  explicit Operation(Hooks hooks) : hooks_(std::move(hooks)) {}

  void set_version(int64_t version);
  // The first call decides; `progress` is what progress() says from then on.
  void finish(const Status& status, const Progress& progress);

  int64_t wait();
  bool wait_for(Timeout timeout);
  bool done() const;
  bool cancel();
  Progress progress() const;
  int64_t version() const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable ended_;
  Hooks hooks_;
  bool done_ = false;
  Status status_;
  int64_t version_ = 0;
  Progress progress_;
};

}  // namespace tessera::bus
