// Which sessions of an agent take callers, and the callers that have come before their session is there.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "base/event_loop.h"
#include "peer/handshake.h"
#include "peer/identity.h"
#include "peer/link.h"

namespace tessera {

inline constexpr size_t kMaxWaiting = 4096;

// A link whose other end has sent its identity and its purpose.
struct Caller {
  std::shared_ptr<Link> link;
  Hello hello;
  Attach attach;
};

// Takes callers for a session of a batch. Called on the loop's thread.
class Acceptor {
 public:
  virtual ~Acceptor() = default;
  // Takes over the link, or throws Error, which the caller gets before the link is closed.
  virtual void accept(Caller caller) = 0;
};

// What is logged and counted of a caller that is turned away.
void log_refusal(const std::string& caller, const Status& why);

// On the loop's thread.
class SessionTable {
 public:
  SessionTable(EventLoop& loop, const Identity& identity) : loop_(loop), identity_(identity) {}
  SessionTable(const SessionTable&) = delete;
  SessionTable& operator=(const SessionTable&) = delete;

  void open(const std::string& session, Acceptor* acceptor);
  void close(const std::string& session, const Acceptor* acceptor);
  // To its session; if there is none yet, it waits for that, but not for ever.
  void take(Caller caller);
  void clear();  // silently turns away all that wait: their connections are closed

 private:
  struct Early {
    Caller caller;
    EventLoop::TimerId timer = 0;
  };

  void keep(Caller caller);
  void hand_over(Caller caller, Acceptor& acceptor);
  void drop(uint64_t id);

  EventLoop& loop_;
  const Identity& identity_;
  uint64_t next_id_ = 1;
  std::map<uint64_t, Early> waiting_;
  std::map<std::string, Acceptor*, std::less<>> sessions_;
};

}  // namespace tessera
