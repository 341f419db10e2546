#include "bus/sender/leases.h"

#include <sys/epoll.h>

#include <algorithm>
#include <utility>

#include "base/mutex.h"

namespace tessera::bus {
namespace {

bool may_read(const Incarnation& process) {
  return liveness_of(process) != Liveness::kDead;
}

// Memory of batches that are closed, of all in this process.
class KeptMemory {
 public:
  static KeptMemory& of_process() {
    static auto& kept = *new KeptMemory;  // until the process ends
    return kept;
  }
  void add(std::vector<Incarnation> readers, std::shared_ptr<std::byte> memory) {
    const MutexLock lock(mutex_);
    std::erase_if(kept_, [](const Kept& kept) { return std::ranges::none_of(kept.readers, may_read); });
    if (!readers.empty()) kept_.push_back({.readers = std::move(readers), .memory = std::move(memory)});
  }

 private:
  struct Kept {
    std::vector<Incarnation> readers;
    std::shared_ptr<std::byte> memory;
  };
  Mutex mutex_;
  std::vector<Kept> kept_ GUARDED_BY(mutex_);
};

}  // namespace

Leases::~Leases() {
  for (const Lease& lease : leases_)
    if (lease.pidfd) loop_.remove_fd(lease.pidfd.get());
}

void Leases::add(uint32_t slot, const Incarnation& process) {
  UniqueFd pidfd = open_pidfd(process);
  if (!pidfd && !may_read(process)) return;
  if (pidfd) loop_.add_fd(pidfd.get(), EPOLLIN, [this, fd = pidfd.get()](uint32_t) { on_death(fd); });
  leases_.push_back({.slot = slot, .process = process, .pidfd = std::move(pidfd)});
}

void Leases::on_death(int pidfd) {
  loop_.remove_fd(pidfd);
  std::erase_if(leases_, [&](const Lease& lease) { return lease.pidfd.get() == pidfd; });
  ended_();
}

void Leases::end(const Incarnation& process) {
  std::erase_if(leases_, [&](const Lease& lease) {
    if (lease.process != process) return false;
    if (lease.pidfd) loop_.remove_fd(lease.pidfd.get());
    return true;
  });
}

bool Leases::hold(uint32_t slot) const {
  return std::ranges::find(leases_, slot, &Lease::slot) != leases_.end();
}

void Leases::keep(std::shared_ptr<std::byte> memory) const {
  std::vector<Incarnation> readers;
  for (const Lease& lease : leases_) readers.push_back(lease.process);
  KeptMemory::of_process().add(std::move(readers), std::move(memory));
}

}  // namespace tessera::bus
