// The agent daemon of one rank: it does for a worker what an embedded agent does in the worker's own process, and
// outlives it.
//
// One worker at a time has a session. When the worker ends, the daemon completes the sends that it had posted from its
// shared memory, fails everything else, and waits for the next worker. A new worker does not wait for sends that nobody
// has begun to take.
#pragma once

#include <memory>
#include <string>

#include "tessera/layout.h"

namespace tessera::bus {

struct DaemonOptions {
  std::string name_space;
  std::string job;
  Rank rank = 0;
};

// Serves from construction to destruction, on its own threads. The destructor ends the session, if there is one: it
// completes sends that somebody is taking, and waits for a store that does not answer as long as its timeout.
// Afterwards nothing accesses the worker's memory.
class Daemon {
 public:
  // Throws kAlreadyExists if that rank already has a daemon on this machine.
  explicit Daemon(DaemonOptions options);
  ~Daemon();
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;

  const std::string& address() const;  // of its Unix socket

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::bus
