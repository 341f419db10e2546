// A stream with a thread, which sleeps while there is nothing to do.
#pragma once

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "device/progress.h"
#include "device/stream.h"

namespace tessera::device {

class ThreadStream final : public Stream, public Helped, public std::enable_shared_from_this<ThreadStream> {
 public:
  ThreadStream(const StreamOptions& options, Device& device);
  ~ThreadStream() override;

  // StreamOptions::helped, before it is given anything.
  void be_helped() { progress_->set_helped(weak_from_this()); }
  void help(uint64_t ticket) override;

  Status status() const override { return progress_->status(); }
  Status take_error() override;
  void close(const Deadline& deadline) override;

 private:
  // An operation, or an event to wait for; neither: nothing.
  struct Item {
    uint64_t ticket = 0;
    uint64_t number = 0;
    std::shared_ptr<const Operation> operation{};
    Event event{};
  };

  void give(Operation&& operation, uint64_t number) override;
  void give(std::shared_ptr<const Operation> operation, uint64_t number) override;
  Event mark(uint64_t event) override;
  void give_wait(const Event& event) override;

  void require_here() const;
  void push(Item item);
  // What comes next; nothing if the stream ends.
  void take(std::vector<Item>& batch);
  void ring();
  void work();
  bool could_run(const Item& item) const;
  void run_and_end(Item& item);
  void run(const Item& item);
  void await_all(const Operation& operation, uint64_t number);
  void run(const Operation& operation, const Item& item);
  void sleep_until(TimePoint when);

  const std::shared_ptr<Link> link_;
  const Duration timeout_;
  const uint64_t forks_;  // of the process that has the thread
  const std::shared_ptr<Progress> progress_;
  Mutex mutex_;
  std::vector<Item> queue_ GUARDED_BY(mutex_);
  uint64_t given_ GUARDED_BY(mutex_) = 0;
  bool stopping_ GUARDED_BY(mutex_) = false;
  bool asleep_ GUARDED_BY(mutex_) = false;
  bool working_ GUARDED_BY(mutex_) = false;  // the thread has taken what it was given
  bool helping_ GUARDED_BY(mutex_) = false;  // somebody else has
  std::vector<Item> helped_;                 // that; its memory is used again
  std::atomic<uint32_t> bell_{0};  // not a condition variable: a forked child could not destroy one that is waited for
  std::atomic<bool> dropping_{false};
  std::thread thread_;
};

}  // namespace tessera::device
