// A stream without a thread: an operation runs in enqueue(), on the thread that calls it.
#pragma once

#include <memory>

#include "base/mutex.h"
#include "device/stream.h"

namespace tessera::device {

// Its operations are the host's own: events of it are done, and carry the poison if there is one.
class InlineStream final : public Stream {
 public:
  InlineStream(const StreamOptions& options, Device& device);

  Status status() const override;
  Status take_error() override;
  void close(const Deadline&) override {}

 private:
  void give(Operation&& operation, uint64_t number) override { run(operation, number); }
  void give(std::shared_ptr<const Operation> operation, uint64_t number) override { run(*operation, number); }
  Event mark(uint64_t event) override;
  void give_wait(const Event& event) override;

  void run(const Operation& operation, uint64_t number);
  void poison(Status status);

  const std::shared_ptr<Link> link_;
  const Duration timeout_;
  std::atomic<bool> poisoned_{false};
  mutable Mutex mutex_;
  Status status_ GUARDED_BY(mutex_);
};

}  // namespace tessera::device
