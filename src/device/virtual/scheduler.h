// Chooses, step by step, which host or stream of a VirtualWorld goes on.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "device/virtual/fiber.h"
#include "device/virtual/virtual_world.h"

namespace tessera::device {

class VirtualStream;

// Belongs to the world's thread.
class VirtualScheduler {
 public:
  VirtualScheduler(uint64_t seed, Order order) : seed_(seed), order_(order), random_(seed) {}

  // What a host, or the thread outside of run(), waits for.
  struct Wait {
    std::function<bool()> ready;  // may throw: then it is ready as well
    std::function<std::string()> what;
  };

  void run(int ranks, const std::function<void(int rank)>& host);
  // Lets others run until it is ready. Throws Error(kCancelled) if the run has ended as nothing could go on, and,
  // outside of run(), Error(kDeadlineExceeded) with all that is blocked.
  void block(const Wait& wait);
  // A place where others may run, as the order has it. Does not throw.
  void perhaps_yield();
  // What ends that which is blocked in a deadlock.
  static Status cancelled();

  void add(VirtualStream& stream) { streams_.push_back(&stream); }
  void remove(VirtualStream& stream) { std::erase(streams_, &stream); }
  // Numbers operations and waits in the order in which they are given.
  uint64_t next() { return ++given_; }
  uint64_t steps() const { return steps_; }

 private:
  struct Host {
    int rank;
    std::unique_ptr<Fiber> fiber;
    const Wait* wait = nullptr;  // null: it has not begun
    uint64_t given = 0;
    Status error{};
  };

  bool step();
  void resume(Host& host);
  void cancel();
  std::string blocked() const;
  [[noreturn]] void fail_stuck(const std::string& errors) const;

  const uint64_t seed_;
  const Order order_;
  std::mt19937_64 random_;
  std::vector<VirtualStream*> streams_;
  std::vector<Host> hosts_;
  Host* current_ = nullptr;  // whose fiber runs
  bool in_stream_ = false;   // an operation runs
  bool cancelling_ = false;
  uint64_t given_ = 0;
  uint64_t steps_ = 0;
};

}  // namespace tessera::device
