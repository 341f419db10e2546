// Waits for something to appear in folders.
#pragma once

#include <stop_token>
#include <string>

#include "base/clock.h"
#include "base/fd.h"

namespace tessera {

// Add the folders, look for what is wanted, and wait if it is not there: what appears after add() is not missed. Not
// thread-safe.
class FolderWatch {
 public:
  FolderWatch();  // throws Error(kResourceExhausted)

  // Again, as often as one likes. A folder that is not there is none. Throws Error.
  void add(const std::string& folder);
  // Until a name has been created in one of the folders, or renamed to, since the last wait: true. False at the
  // deadline, and once a stop is requested.
  bool wait(const Deadline& deadline, const std::stop_token& stop = {});

 private:
  bool take_events();

  UniqueFd events_;   // inotify
  UniqueFd stopped_;  // eventfd
};

}  // namespace tessera
