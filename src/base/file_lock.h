// Locks between processes: flock() on a file, which is released with the descriptor, hence when the process ends.
#pragma once

#include <string>

#include "base/clock.h"
#include "base/fd.h"

namespace tessera {

// Takes an exclusive flock on `fd`; false at the deadline if somebody else still holds one. The kernel wakes the wait,
// which runs on a temporary thread. Throws Error.
bool lock_fd(int fd, const Deadline& deadline);

// Takes an exclusive flock on `path` (created with mode 0600 if needed) without waiting; empty if someone else holds
// it. Closing the descriptor releases the lock. If the holder removes the file during the call, it counts as held: try
// again.
UniqueFd try_lock_file(const std::string& path);
// Whether someone holds the flock of that file. Creates nothing. The check itself takes a shared lock for a moment.
bool is_lock_held(const std::string& path);
// Like try_lock_file(), but waits for the holder, and for the next one if the holder removes the file. Empty at the
// deadline, or if the folder has been removed. For locks that are held briefly.
UniqueFd lock_file(const std::string& path, const Deadline& deadline);
// Whether the path still names the open file.
bool same_file(int fd, const std::string& path);

}  // namespace tessera
