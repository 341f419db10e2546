#include "base/fd.h"

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cstddef>
#include <mutex>
#include <shared_mutex>
#include <utility>

namespace tessera {
namespace {

constexpr size_t kWordBits = 64;

// One bit for each descriptor number that a UniqueFd owns. Pages that were never touched take no memory.
constinit std::array<std::atomic<uint64_t>, kMaxTrackedFds / kWordBits> tracked{};

// std::shared_mutex prefers readers: threads that close descriptors one after another would keep a fork waiting for
// ever.
class ForkMutex {
 public:
  void lock() { ::pthread_rwlock_wrlock(&lock_); }
  void unlock() { ::pthread_rwlock_unlock(&lock_); }
  void lock_shared() { ::pthread_rwlock_rdlock(&lock_); }
  void unlock_shared() { ::pthread_rwlock_unlock(&lock_); }

 private:
  pthread_rwlock_t lock_ = PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP;
};
// Held shared while a descriptor is untracked and closed, exclusively across a fork. A fork between the two would leave
// the child with a descriptor that nobody closes.
struct ForkLock {
  ForkMutex mutex{};
  ForkLock* parents = nullptr;  // unused in the child: it counts waiters that are threads of the parent
};
constinit ForkLock first_lock;
constinit std::atomic<ForkLock*> fork_lock{&first_lock};  // this process's own
constinit ForkLock* childs_lock = nullptr;                // during a fork; guarded by fork_lock

std::shared_lock<ForkMutex> not_forking() {
  return std::shared_lock(fork_lock.load(std::memory_order_relaxed)->mutex);
}

std::atomic<uint64_t>& word_of(int fd) {
  return tracked[static_cast<size_t>(fd) / kWordBits];
}
uint64_t bit_of(int fd) {
  return uint64_t{1} << (static_cast<size_t>(fd) % kWordBits);
}

void clear_bit(int fd) {
  if (fd < kMaxTrackedFds) word_of(fd).fetch_and(~bit_of(fd), std::memory_order_relaxed);
}

}  // namespace

// Does only what is safe in a forked child of a process with threads: no allocation, no destructor, no lock of the
// parent.
struct ForkHandlers {
  static void before() {
    ForkLock* const own = fork_lock.load(std::memory_order_relaxed);
    own->mutex.lock();
    childs_lock = new ForkLock{.parents = own};  // allocated here, since the child must not allocate
  }
  static void in_parent() {
    delete std::exchange(childs_lock, nullptr);
    fork_lock.load(std::memory_order_relaxed)->mutex.unlock();
  }
  static void in_child() {
    for (size_t w = 0; w < tracked.size(); ++w) {
      uint64_t bits = tracked[w].load(std::memory_order_relaxed);
      if (bits == 0) continue;  // do not write to it, or the child would copy the page
      tracked[w].store(0, std::memory_order_relaxed);
      for (; bits != 0; bits &= bits - 1) ::close(static_cast<int>(w * kWordBits) + std::countr_zero(bits));
    }
    UniqueFd::current_.fetch_add(1, std::memory_order_relaxed);
    ForkLock* const own = std::exchange(childs_lock, nullptr);
    fork_lock.store(own, std::memory_order_relaxed);
    own->parents->mutex.unlock();
  }
};

namespace {

// Runs when the program starts, before it has threads. A fork while another thread did this would leave the child
// waiting for it.
[[maybe_unused]] const int installed =
    ::pthread_atfork(ForkHandlers::before, ForkHandlers::in_parent, ForkHandlers::in_child);

}  // namespace

void UniqueFd::track(int fd) {
  const auto lock = not_forking();
  if (fd < kMaxTrackedFds) word_of(fd).fetch_or(bit_of(fd), std::memory_order_relaxed);
}

void UniqueFd::untrack(int fd) {
  const auto lock = not_forking();
  clear_bit(fd);
}

void UniqueFd::close_owned(int fd, bool kept) {
  const auto lock = not_forking();
  if (!kept) clear_bit(fd);
  ::close(fd);
}

}  // namespace tessera
