// Ranks without threads and without a clock: the same program runs in every order that its events and words allow, as
// a seed says, and a wait that nothing can end is found at once.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string_view>

#include "device/device.h"

namespace tessera::device {

class VirtualScheduler;

// Which of the operations and hosts that can go on does so next.
enum class Order : uint8_t {
  kRandom,
  kLatestFirst,    // the one that was given last: streams run as late as they may
  kEarliestFirst,  // the one that was given first: streams run as early as they may
};
std::string_view to_string(Order order);  // "random", "latest first", "earliest first"

// N ranks in one thread. A host program is a fiber; it lets others run when it waits, and, except in kLatestFirst, when
// it enqueues: so it must not hold a lock that another rank takes during either. Deadlines do not pass. Nothing is
// paced. Belongs to one thread; outlives its devices' streams and buffers.
class VirtualWorld {
 public:
  explicit VirtualWorld(uint64_t seed, Order order = Order::kRandom, bool poison = true);
  ~VirtualWorld();
  VirtualWorld(const VirtualWorld&) = delete;
  VirtualWorld& operator=(const VirtualWorld&) = delete;

  // The device of a rank, made at first use.
  Device& device(int rank);

  // Runs host(0), ..., host(ranks - 1), each in a fiber with Fiber::kStackBytes of stack, and everything that they
  // enqueue, to the end. Throws Error with the failures of all hosts, each with its rank, and the first one's code. If
  // nothing can go on: Error(kDeadlineExceeded) with every host and every stream that is blocked and what it waits for;
  // the hosts' waits then throw Error(kCancelled), so that their stacks are unwound.
  //
  // Outside of it, a host wait of the calling thread runs operations until it may end.
  void run(int ranks, const std::function<void(int rank)>& host);

  // How many operations, waits and resumed hosts there have been.
  uint64_t steps() const;

 private:
  const std::unique_ptr<VirtualScheduler> scheduler_;
  const bool poison_;
  std::map<int, std::unique_ptr<Device>> devices_;  // after the scheduler, which they use
};

}  // namespace tessera::device
