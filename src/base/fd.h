// A file descriptor that closes itself. Move-only; not thread-safe.
//
// It stays with the process that made it: after fork(), the child closes every descriptor that a UniqueFd owns, so that
// a peer sees a connection end with this process even if a child lives on. The child's copy of such an object is empty;
// it closes nothing, whatever the number means there by now. keep_across_fork() makes an exception.
//
// vfork, posix_spawn and a bare clone run no fork handlers, so nothing is closed: descriptors should be close-on-exec.
// Two kinds of descriptors stay open in the child: numbers from kMaxTrackedFds on, and one that the kernel has just
// given to another thread, but that its UniqueFd does not own yet.
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

  // -1 if it is empty, as it always is in a forked child.
  int get() const { return made_in_ == current_.load(std::memory_order_relaxed) || made_in_ == kKept ? fd_ : -1; }
  explicit operator bool() const { return get() >= 0; }

  // Gives up ownership; a child forked later inherits the descriptor like any other.
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
  // From now on a forked child inherits the descriptor, and its copy of this object owns it there.
  void keep_across_fork() {
    if (get() < 0 || made_in_ == kKept) return;
    untrack(fd_);
    made_in_ = kKept;
  }

 private:
  friend struct ForkHandlers;
  static constexpr uint32_t kKept = UINT32_MAX;
  // The number of forks between the first process and this one.
  static inline std::atomic<uint32_t> current_{0};

  static void track(int fd);
  static void untrack(int fd);
  static void close_owned(int fd, bool kept);

  int fd_ = -1;
  uint32_t made_in_ = 0;  // the value of current_, or kKept
};

}  // namespace tessera
