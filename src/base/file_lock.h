// Locks between processes: flock() on a file, which ends with the descriptor, and so with the process.
#pragma once

#include <string>

#include "base/clock.h"
#include "base/fd.h"

namespace tessera {

// Takes an exclusive flock on `fd`; false at the deadline, if somebody else still holds one. The kernel wakes the wait,
// which has a thread of its own meanwhile. Throws Error.
bool lock_fd(int fd, const Deadline& deadline);

// Takes an exclusive flock on `path` (created 0600 if need be) without waiting; empty if someone else holds it. The
// lock ends with the descriptor. A file removed by its holder meanwhile counts as held: try again.
UniqueFd try_lock_file(const std::string& path);
// Whether someone holds the flock of that file. Creates nothing, and to look takes a shared lock for a moment.
bool is_lock_held(const std::string& path);
// The same as try_lock_file(), but waits for its holder, and for the next one if that removes the file; empty at
// the deadline, or if the folder has been removed. For locks that are held briefly.
UniqueFd lock_file(const std::string& path, const Deadline& deadline);
// Whether the path still names the file that is open.
bool same_file(int fd, const std::string& path);

}  // namespace tessera
