#include "base/folder_watch.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#include "base/fail.h"

namespace tessera {

FolderWatch::FolderWatch()
    : events_(::inotify_init1(IN_NONBLOCK | IN_CLOEXEC)), stopped_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!events_ || !stopped_)
    fail(ErrorCode::kResourceExhausted,
         "a folder cannot be watched: {}: raise `ulimit -n` or fs.inotify.max_user_instances"_message,
         std::strerror(errno));
}

void FolderWatch::add(const std::string& folder) {
  if (::inotify_add_watch(events_.get(), folder.c_str(), IN_CREATE | IN_MOVED_TO | IN_ONLYDIR) < 0 && errno != ENOENT &&
      errno != ENOTDIR)
    fail_errno(fmt::format("watch {}", folder));
}

bool FolderWatch::take_events() {
  std::array<std::byte, 4096> events;
  bool some = false;
  while (::read(events_.get(), events.data(), events.size()) > 0) some = true;
  return some;
}

bool FolderWatch::wait(const Deadline& deadline, const std::stop_token& stop) {
  const std::stop_callback wake(stop, [this] { ::eventfd_write(stopped_.get(), 1); });
  while (!take_events()) {
    if (stop.stop_requested() || deadline.passed()) return false;
    std::array<pollfd, 2> awaited{pollfd{.fd = events_.get(), .events = POLLIN, .revents = 0},
                                  pollfd{.fd = stopped_.get(), .events = POLLIN, .revents = 0}};
    if (::poll(awaited.data(), awaited.size(), deadline.poll_ms()) < 0 && errno != EINTR) fail_errno("poll");
  }
  return true;
}

}  // namespace tessera
