#include "bus/operation.h"

namespace tessera::bus {

void Operation::set_version(int64_t version) {
  const std::lock_guard lock(mutex_);
  version_ = version;
}

void Operation::finish(const Status& status, const Progress& progress) {
  Hooks dropped;  // destroyed outside the lock: they may hold the last reference to the batch
  {
    const std::lock_guard lock(mutex_);
    if (done_) return;
    done_ = true;
    status_ = status;
    progress_ = progress;
    dropped = std::exchange(hooks_, {});
  }
  ended_.notify_all();
}

int64_t Operation::wait() {
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [&] { return done_; });  // the batch ends every operation at its deadline
  status_.throw_if_error();
  return version_;
}

bool Operation::wait_for(Timeout timeout) {
  std::unique_lock lock(mutex_);
  return ended_.wait_for(lock, timeout, [&] { return done_; });
}

bool Operation::done() const {
  const std::lock_guard lock(mutex_);
  return done_;
}

bool Operation::cancel() {
  std::function<bool()> cancel;
  {
    const std::lock_guard lock(mutex_);
    if (done_) return false;
    cancel = hooks_.cancel;
  }
  return cancel && cancel();
}

Progress Operation::progress() const {
  std::function<Progress()> sample;
  {
    const std::lock_guard lock(mutex_);
    if (done_) return progress_;
    sample = hooks_.sample;
  }
  return sample ? sample() : Progress{};
}

int64_t Operation::version() const {
  const std::lock_guard lock(mutex_);
  return version_;
}

}  // namespace tessera::bus
