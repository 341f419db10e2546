// The agent daemon of one rank: it does for a worker what an embedded agent does in the worker's own process, and
// outlives it.
//
// One worker at a time has a session. When the worker ends, sends that it had posted are finished from its shared
// memory, everything else fails, and the next worker is waited for; it need not wait for sends that nobody has begun to
// take.
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

// Serves from its construction to its destruction, on threads of its own. The destructor ends the session, if there is
// one: sends that somebody takes are finished first, and a store that does not answer is asked for its time-out. Then
// nothing reads or writes the worker's memory.
class Daemon {
 public:
  // Throws kAlreadyExists if that rank has a daemon here.
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
