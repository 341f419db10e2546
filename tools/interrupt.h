// SIGINT and SIGTERM as an orderly end: what is under way is cancelled, destructors run, the process ends with 130.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <thread>

#include "base/fd.h"

namespace tessera::tools {

// Make one, first thing in main(): it blocks both signals for the threads that start later, and waits for them on a
// thread of its own. A command that has not ended a second after the signal, or at a second one, is ended by
// _exit(130): a wait that cannot be cancelled must not hold the user. Thread-safe.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  bool requested() const { return requested_.load(std::memory_order_acquire); }
  // Throws Error(kCancelled) after a signal. Call it between steps.
  void check() const;
  // Blocks until a signal comes.
  void wait() const;

  // While it lives, a signal calls `cancel`, on the signal thread; at once if the signal has come already.
  class Scope {
   public:
    Scope(Interrupt& interrupt, std::function<void()> cancel);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Interrupt& interrupt_;
  };

 private:
  void serve();

  std::atomic<bool> requested_{false};
  std::mutex mutex_;
  std::function<void()> cancel_;  // guarded by mutex_
  UniqueFd signals_;
  UniqueFd came_;   // readable once a signal has come
  UniqueFd ended_;  // readable once the destructor runs
  std::thread thread_;
};

}  // namespace tessera::tools
