// The outcome of one send or recv, shared between the user's Handle and the batch that works on it.
#pragma once

#include <functional>
#include <memory>

#include "base/clock.h"
#include "base/fork_guard.h"
#include "base/mutex.h"
#include "bus/batch/client.h"
#include "tessera/bus.h"
#include "tessera/error.h"

namespace tessera::bus {

class BatchImpl;

// Ends exactly once, and releases its owner then. Thread-safe.
class Operation final : public OperationClient {
 public:
  Operation(std::shared_ptr<BatchImpl> owner, uint64_t number)
      : number_(number), owner_(std::move(owner)), batch_(owner_) {}
  // Starts over as a new operation. REQUIRES: it has ended, and nobody else refers to it.
  void restart(std::shared_ptr<BatchImpl> owner, uint64_t number);

  void set_version(int64_t version);
  // Only the first call counts; progress() returns `progress` from then on.
  void finish(const Status& status, const Progress& progress);

  // Calls `ended` once when it has ended: on the thread that ends it, or immediately. One callback at a time.
  void on_end(std::function<void()> ended);

  int64_t wait() override;
  bool wait_for(Timeout timeout, std::stop_token stop) override;
  bool done() const override;
  bool cancel() override;
  bool withdraw() override;
  Progress progress() const override;
  int64_t version() const override;

 private:
  // The owner and the operation's number; null once it has ended.
  std::pair<std::shared_ptr<BatchImpl>, uint64_t> owner() const;

  const ForkGuard process_;
  mutable Mutex mutex_;
  CondVar ended_;
  uint64_t number_ GUARDED_BY(mutex_);
  std::shared_ptr<BatchImpl> owner_ GUARDED_BY(mutex_);  // works on it; null once it has ended
  std::weak_ptr<BatchImpl> batch_ GUARDED_BY(mutex_);    // kept after the end
  bool done_ GUARDED_BY(mutex_) = false;
  Status status_ GUARDED_BY(mutex_);
  int64_t version_ GUARDED_BY(mutex_) = 0;
  Progress progress_ GUARDED_BY(mutex_);
  std::function<void()> on_end_ GUARDED_BY(mutex_);
};

}  // namespace tessera::bus
