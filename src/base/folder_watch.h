// Waits for names to appear in folders.
#pragma once

#include <stop_token>
#include <string>

#include "base/clock.h"
#include "base/fd.h"

namespace tessera {

// Add the folders, look for what you want, and wait if it is missing: nothing that appears after add() is missed. Not
// thread-safe.
class FolderWatch {
 public:
  FolderWatch();  // throws Error(kResourceExhausted)

  // May be called again for the same folder. A folder that does not exist is ignored. Throws Error.
  void add(const std::string& folder);
  // Waits until a name has been created in one of the folders, or renamed into it, since the last wait. False at the
  // deadline, and once a stop is requested.
  bool wait(const Deadline& deadline, const std::stop_token& stop = {});

 private:
  bool take_events();

  UniqueFd events_;   // inotify
  UniqueFd stopped_;  // eventfd
};

}  // namespace tessera
