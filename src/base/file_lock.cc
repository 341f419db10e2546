#include "base/file_lock.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <cerrno>

#include "base/fail.h"

namespace tessera {
namespace {

bool try_lock(int fd) {
  if (::flock(fd, LOCK_EX | LOCK_NB) == 0) return true;
  if (errno != EWOULDBLOCK && errno != EINTR) fail_errno("flock");
  return false;
}

struct LockWait {
  int fd;
  int over;  // an eventfd
};

// The body of a thread that may be cancelled while it waits. It owns nothing: the lock belongs to the descriptor. After
// the wait it ends by itself and must not be cancelled.
extern "C" void* wait_for_lock(void* wait) {
  const auto [fd, over] = *static_cast<const LockWait*>(wait);
  int before = 0;
  ::pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, &before);
  while (::flock(fd, LOCK_EX) != 0 && errno == EINTR) {
  }
  ::pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
  ::eventfd_write(over, 1);
  return nullptr;
}

UniqueFd open_lock(const std::string& path) {
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd && errno != ENOENT) fail_errno(fmt::format("open {}", path));
  return fd;  // empty: somebody has just removed its folder
}

}  // namespace

// flock() has no timeout, and only a signal interrupts it: here the C library's own, which cancels a thread.
bool lock_fd(int fd, const Deadline& deadline) {
  if (try_lock(fd)) return true;
  if (deadline.passed()) return false;
  const UniqueFd over(::eventfd(0, EFD_CLOEXEC));
  if (!over) fail_errno("eventfd");
  LockWait wait{.fd = fd, .over = over.get()};
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // a new thread inherits the mask
  pthread_t thread{};
  const int error = ::pthread_create(&thread, nullptr, wait_for_lock, &wait);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error != 0) fail_errno("a thread that waits for a lock", error);
  pollfd ready{.fd = over.get(), .events = POLLIN, .revents = 0};
  while (::poll(&ready, 1, deadline.poll_ms()) <= 0 && !deadline.passed()) {
  }
  ::pthread_cancel(thread);
  ::pthread_join(thread, nullptr);
  return try_lock(fd);  // no effect if we hold it already
}

UniqueFd try_lock_file(const std::string& path) {
  UniqueFd fd = open_lock(path);
  if (!fd || !try_lock(fd.get()) || !same_file(fd.get(), path)) return {};
  return fd;
}

bool is_lock_held(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  return fd && ::flock(fd.get(), LOCK_SH | LOCK_NB) != 0;
}

UniqueFd lock_file(const std::string& path, const Deadline& deadline) {
  while (true) {
    UniqueFd fd = open_lock(path);
    if (!fd || !lock_fd(fd.get(), deadline)) return {};
    if (same_file(fd.get(), path)) return fd;
    if (deadline.passed()) return {};
  }
}

bool same_file(int fd, const std::string& path) {
  struct stat held{}, named{};
  return ::fstat(fd, &held) == 0 && ::lstat(path.c_str(), &named) == 0 && held.st_ino == named.st_ino &&
         held.st_dev == named.st_dev;
}

}  // namespace tessera
