// The sessions of an agent that take callers, and the callers that came before their session was open.
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
  // Takes over the link. If it throws Error, the caller gets the error before the link is closed.
  virtual void accept(Caller caller) = 0;
};

// Logs and counts a caller that is refused.
void log_refusal(const std::string& caller, const Status& why);

// On the loop's thread.
class SessionTable {
 public:
  SessionTable(EventLoop& loop, const Identity& identity) : loop_(loop), identity_(identity) {}
  SessionTable(const SessionTable&) = delete;
  SessionTable& operator=(const SessionTable&) = delete;

  void open(const std::string& session, Acceptor* acceptor);
  void close(const std::string& session, const Acceptor* acceptor);
  // Gives the caller to its session. If that is not open yet, the caller waits for it, but not for ever.
  void take(Caller caller);
  void clear();  // closes the links of all waiting callers, without a reason

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
