// The connections of an agent with other agents. It greets callers and dials the agents that it calls. All links
// between two agents share one connection, whichever side has dialed it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/event_loop.h"
#include "base/mutex.h"
#include "peer/handshake.h"
#include "peer/identity.h"
#include "peer/peer_connection.h"
#include "peer/report.h"
#include "peer/session_table.h"

namespace tessera {

// The agent that a rank calls, from its record. Address and incarnation identify it, since a process may have several.
struct Callee {
  std::string address;  // of its Unix socket
  std::string name;     // "trainer/3"
  Incarnation incarnation;
};

// Lets threads that call the same agent at once share a connection: one at a time looks for it, or dials.
class DialTurns {
 public:
  using Key = std::pair<std::string, uint64_t>;  // address, and the incarnation's nonce

  // Waits for its turn, which lasts until it is destroyed. Throws kDeadlineExceeded.
  class Turn {
   public:
    Turn(DialTurns& turns, const Callee& callee, Deadline deadline);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    DialTurns& turns_;
    const Key key_;
  };

 private:
  Mutex mutex_;
  CondVar changed_;
  std::set<Key> taken_ GUARDED_BY(mutex_);
};

// On the loop's thread.
class ConnectionPool {
 public:
  using OnLink = std::function<void(std::shared_ptr<Link>)>;
  struct Events {
    std::function<void(Caller)> on_caller;  // an exception ends the link, and is sent to the caller
    std::function<Report()> report;         // the answer to Inspect
  };

  ConnectionPool(EventLoop& loop, const Identity& identity, const Incarnation& incarnation, Events events);
  ~ConnectionPool() = default;  // REQUIRES: closed, or nobody has connected
  ConnectionPool(const ConnectionPool&) = delete;
  ConnectionPool& operator=(const ConnectionPool&) = delete;

  // Greets a caller that has connected to this agent. Throws kPermissionDenied for another user, kResourceExhausted.
  void accept(UniqueFd socket);
  // Opens a link over an existing connection; false if there is none. `on_link` runs before any frame arrives over it.
  bool attach(const Callee& callee, const Attach& attach, const OnLink& on_link);
  // The same over a new connection. `socket` is connected to the callee's address.
  void dial(UniqueFd socket, const Callee& callee, const Attach& attach, const OnLink& on_link);
  // The first message of this agent on a new connection.
  Hello hello() const;
  void close();  // closes all connections; no handler in this process is called

 private:
  struct Peer {
    std::shared_ptr<PeerConnection> connection;
    bool dialed = false;
    bool left = false;    // dialed: Goodbye was sent
    bool proven = false;  // accepted: it is the process that its Hello names
    std::string callee;   // dialed: its name
    Hello hello;          // its identity; until a dialed peer has answered, the expected identity
    EventLoop::TimerId timer = 0;
    pid_t pid = 0;
  };

  void make_room();
  uint64_t add(UniqueFd socket, PeerConnection::Side side, std::string name);
  bool usable(const Peer& peer, const Callee& callee) const;
  void open_link(Peer& peer, const Callee& callee, const Attach& attach, const OnLink& on_link);
  void handle_frame(uint64_t id, Frame& frame);
  void handle_hello(Peer& peer, const Hello& hello);
  void handle_welcome(Peer& peer, const Frame& frame);
  void handle_idle(uint64_t id);
  void handle_attach(uint64_t id, std::shared_ptr<Link> link, Attach attach);
  void end_after(uint64_t id, Duration limit, const char* awaited);
  void refuse(Peer& peer, const Status& why);
  void drop(uint64_t id);

  EventLoop& loop_;
  const Identity& identity_;
  const Incarnation& incarnation_;
  const Events events_;
  uint64_t next_id_ = 1;
  std::map<uint64_t, Peer> peers_;
};

}  // namespace tessera
