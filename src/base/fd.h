// A file descriptor that closes itself. Move-only; not thread-safe.
//
// It stays with the process that made it: fork() closes in the child every descriptor that a UniqueFd owns, so that a
// peer sees a connection end with this process although a child lives on. The child's copy of such an object is empty;
// it closes nothing, whatever the number has come to mean there. keep_across_fork() makes an exception.
//
// What runs no fork handlers (vfork, posix_spawn, a bare clone) closes nothing: descriptors should be close-on-exec.
// Out of reach too are numbers from kMaxTrackedFds on, and a descriptor that another thread has from the kernel at the
// moment of the fork but has not yet handed to its UniqueFd.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

namespace tessera {

inline constexpr int kMaxTrackedFds = 1 << 20;  // the kernel's own default limit (fs.nr_open)

class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd), made_in_(current_) {
    if (fd >= 0) track(fd);
  }
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)), made_in_(other.made_in_) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this == &other) return *this;
    reset();
    fd_ = std::exchange(other.fd_, -1);
    made_in_ = other.made_in_;
    return *this;
  }
  ~UniqueFd() { reset(); }

  // -1 if it is empty, as it is in a forked child.
  int get() const { return made_in_ == current_.load(std::memory_order_relaxed) || made_in_ == kKept ? fd_ : -1; }
  explicit operator bool() const { return get() >= 0; }

  // Gives the descriptor away; a child forked later inherits it as any other.
  int release() {
    const int fd = get();
    if (fd >= 0 && made_in_ != kKept) untrack(fd);
    fd_ = -1;
    return fd;
  }
  void reset() {
    if (get() >= 0) close_owned(fd_, made_in_ == kKept);
    fd_ = -1;
  }
  void reset(int fd) { *this = UniqueFd(fd); }
  // From now on a forked child gets the descriptor, and its copy of this object owns it there.
  void keep_across_fork() {
    if (get() < 0 || made_in_ == kKept) return;
    untrack(fd_);
    made_in_ = kKept;
  }

 private:
  friend struct ForkHandlers;
  static constexpr uint32_t kKept = UINT32_MAX;
  // How many forks lie between the first process and this one.
  static inline std::atomic<uint32_t> current_{0};

  static void track(int fd);
  static void untrack(int fd);
  static void close_owned(int fd, bool kept);

  int fd_ = -1;
  uint32_t made_in_ = 0;  // the value of current_, or kKept
};

}  // namespace tessera
