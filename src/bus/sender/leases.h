// Processes that may still read a snapshot although their connection has ended: a receiver that commits straight out of
// it reads until it is done, whatever the sender thinks of it (bus/session/versions.h, Take). What it reads must not be
// written meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/event_loop.h"
#include "base/fd.h"
#include "base/process.h"

namespace tessera::bus {

// Of one sending batch. On the loop's thread.
class Leases {
 public:
  // `ended` is called when the death of a process has ended a lease. REQUIRES: the loop outlives this
  Leases(EventLoop& loop, std::function<void()> ended) : loop_(loop), ended_(std::move(ended)) {}
  ~Leases();
  Leases(const Leases&) = delete;
  Leases& operator=(const Leases&) = delete;

  void add(uint32_t slot, const Incarnation& process);  // nothing happens if that process is dead
  void end(const Incarnation& process);                 // it is done with all that it read
  bool hold(uint32_t slot) const;
  // The batch closes: the memory of its slots is kept until the processes that may read it are dead. Looks then, and at
  // later calls, also those of other batches.
  void keep(std::shared_ptr<std::byte> memory) const;

 private:
  struct Lease {
    uint32_t slot = 0;
    Incarnation process;
    UniqueFd pidfd;  // empty where its death cannot be seen from here
  };
  void on_death(int pidfd);

  EventLoop& loop_;
  const std::function<void()> ended_;
  std::vector<Lease> leases_;
};

}  // namespace tessera::bus
