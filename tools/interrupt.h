// Turns SIGINT and SIGTERM into an orderly end: current operations are cancelled, destructors run, and the process ends
// with 130, or with 0 if it is a service that SIGTERM has ended.
#pragma once

#include <atomic>
#include <functional>
#include <stop_token>
#include <thread>

#include "base/fd.h"

namespace tessera::tools {

// Create it first thing in main(): it blocks both signals for threads that start later, and waits for them on a
// separate thread. Waits are stopped through stop_token(). A command that has not ended three seconds after the signal,
// or at a second signal, is ended by _exit(130): work that cannot be cancelled (a transfer that has begun to write)
// must not hold up the user. Thread-safe.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  // Stop is requested by the first signal, on the signal thread.
  std::stop_token stop_token() const { return stop_.get_token(); }
  bool requested() const { return stop_.stop_requested(); }
  // Throws Error(kCancelled) after a signal. Call it between steps.
  void check() const;
  // Blocks until a signal comes; returns it.
  int wait() const;

  // While it lives, a signal calls `cancel` on the signal thread; immediately if the signal has already come.
  class Scope {
   public:
    Scope(Interrupt& interrupt, std::function<void()> cancel) : callback_(interrupt.stop_token(), std::move(cancel)) {}

   private:
    std::stop_callback<std::function<void()>> callback_;
  };

 private:
  void serve();

  std::stop_source stop_;
  std::atomic<int> signal_ = 0;  // the first one
  UniqueFd signals_;
  UniqueFd came_;   // readable once a signal has come
  UniqueFd ended_;  // readable once the destructor runs
  std::thread thread_;
};

}  // namespace tessera::tools
