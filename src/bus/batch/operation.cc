#include "bus/batch/operation.h"

#include <utility>

#include "bus/batch/batch.h"

namespace tessera::bus {

void Operation::restart(std::shared_ptr<BatchImpl> owner, uint64_t number) {
  const MutexLock lock(mutex_);  // orders this after the last user's accesses
  number_ = number;
  owner_ = std::move(owner);
  batch_ = owner_;
  done_ = false;
  status_ = {};
  version_ = 0;
  progress_ = {};
}

void Operation::set_version(int64_t version) {
  const MutexLock lock(mutex_);
  version_ = version;
}

void Operation::finish(const Status& status, const Progress& progress) {
  std::shared_ptr<BatchImpl> dropped;  // outside the lock: it may be the last reference to the batch
  std::function<void()> told;
  {
    const MutexLock lock(mutex_);
    if (done_) return;
    done_ = true;
    status_ = status;
    progress_ = progress;
    dropped = std::move(owner_);
    told = std::exchange(on_end_, {});
  }
  ended_.notify_all();
  if (told) told();
}

void Operation::on_end(std::function<void()> ended) {
  {
    const MutexLock lock(mutex_);
    if (!done_) {
      on_end_ = std::move(ended);
      return;
    }
  }
  ended();
}

int64_t Operation::wait() {
  process_.require("a handle");
  const MutexLock lock(mutex_);
  ended_.wait(mutex_, [this]() REQUIRES(mutex_) { return done_; });  // the batch ends every operation at its deadline
  status_.throw_if_error();
  return version_;
}

bool Operation::wait_for(Timeout timeout, std::stop_token stop) {
  process_.require("a handle");
  const std::stop_callback wake(stop, [this] {
    {
      const MutexLock lock(mutex_);
    }  // a thread that has just looked is asleep by now
    ended_.notify_all();
  });
  const MutexLock lock(mutex_);
  ended_.wait_until(mutex_, Deadline::after(timeout),
                    [&]() REQUIRES(mutex_) { return done_ || stop.stop_requested(); });
  return done_;
}

bool Operation::done() const {
  process_.require("a handle");
  const MutexLock lock(mutex_);
  return done_;
}

bool Operation::cancel() {
  process_.require("a handle");
  const auto [working, number] = owner();
  return working && working->cancel(number);
}

bool Operation::withdraw() {
  process_.require("a handle");
  std::shared_ptr<BatchImpl> batch;
  int64_t version = 0;
  {
    const MutexLock lock(mutex_);
    batch = batch_.lock();
    version = version_;
  }
  return batch && batch->withdraw(version);
}

Progress Operation::progress() const {
  process_.require("a handle");
  if (const auto [working, number] = owner(); working) return working->sample();
  const MutexLock lock(mutex_);
  return progress_;
}

std::pair<std::shared_ptr<BatchImpl>, uint64_t> Operation::owner() const {
  const MutexLock lock(mutex_);
  return {owner_, number_};
}

int64_t Operation::version() const {
  const MutexLock lock(mutex_);
  return version_;
}

}  // namespace tessera::bus
