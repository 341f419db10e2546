// The store's server: one thread, an EventLoop, for all connections. Protocol: docs/formats/store-protocol.md.
//
// If a connection sends anything malformed, or does not read the events of its watches, the server closes it and logs a
// warning; other clients do not notice. A new connection must first say hello, and prove that it knows the token if
// there is one. It has a short time for that, and if too many have not done so, the oldest is closed. A request waits
// until its client has read most of its earlier answers. A server that follows another one (see `awaited`) first
// gathers what clients publish again. Until that is over it accepts connections and holds their requests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/event_loop.h"
#include "base/fd.h"
#include "base/framing.h"
#include "base/listener.h"
#include "store/memory/state.h"
#include "store/memory/state_file.h"
#include "store/protocol.h"
#include "store/service.h"
#include "store/token.h"

namespace tessera::store {

struct Member {
  uint64_t client = 0;
  Incarnation incarnation;
  static void fields(auto& f, auto& self) {
    f("client", self.client);
    f("incarnation", self.incarnation);
  }
};

struct ServerOptions {
  const Clock* clock = &Clock::steady();
  State::Limits limits{};
  size_t max_queued_bytes = size_t{64} << 20;  // events for a connection; a slower reader is disconnected
  Duration republication = std::chrono::seconds(1);
  std::string data_dir{};                       // the state is kept there; empty: nowhere
  int64_t revision_floor = 0;                   // revisions start above it
  std::vector<Member> awaited{};                // clients of the previous server: it gathers until all are back or dead
  bool same_user_only = false;                  // for Unix sockets
  std::optional<Token> token{};                 // for TCP: clients must prove that they know it
  Duration greeting = std::chrono::seconds(5);  // a new connection's time to say hello
  size_t max_greeting = 256;                    // connections that have not said it yet
  // Called on the server's thread when a client has come or gone, with all present and awaited ones. Must not throw.
  std::function<void(const std::vector<Member>&)> on_members{};
};

class Server final : public StoreServer {
 public:
  // `listener` is a listening socket, `address` its URL.
  Server(UniqueFd listener, std::string address, ServerOptions options);
  ~Server() override;

  std::string address() const override { return address_; }
  // Ends the thread. Connections stay open, but are not served, until the object ends. Idempotent.
  void stop() { loop_.stop(); }
  // After stop(): the awaited clients, and those that are connected now, even if some left after the last event.
  std::vector<Member> connected_members() const;
  bool gathering() const { return !awaited_.empty(); }  // after stop(): whether awaited clients have not come back
  // For tests: a FakeClock must be moved on this loop.
  EventLoop& loop() { return loop_; }

 private:
  struct Greeting {
    StoreHello hello;
    Handshake handshake;
  };

  struct Session {
    Session(uint64_t number, UniqueFd connection);

    uint64_t id;
    UniqueFd fd;
    FrameReader reader;
    FrameWriter writer;
    std::optional<StoreHello> hello;   // set once it has said hello, and proved that it knows the token
    std::optional<Greeting> greeting;  // until then: its hello, and the challenge
    EventLoop::TimerId greeting_timer = 0;
    std::map<uint64_t, std::string> watches;  // prefix by id
    std::optional<Frame> held;                // waits for the end of gathering; nothing more is read until then
    bool flush_due = false;
    bool ended = false;       // refused: closed once everything is sent
    size_t answer_bytes = 0;  // at most this many of the queued bytes are answers, the others are events
    size_t queued_answers() const { return std::min(answer_bytes, writer.queued_bytes()); }
    size_t queued_events() const { return writer.queued_bytes() - queued_answers(); }
    bool takes_requests() const;
    std::string name() const;
  };

  struct Awaited {
    Member member;
    UniqueFd pidfd;  // empty: this process cannot see its death
  };

  void refuse(const Error& why);
  void add_session(UniqueFd fd);
  void on_ready(uint64_t id, uint32_t events);
  void advance(Session& session);
  void pump(Session& session);
  void take(Session& session, const Frame& frame);
  void handle(Session& session, const Frame& frame);
  void on_hello(Session& session, const Frame& frame);
  void on_proof(Session& session, const Frame& frame);
  void welcome(Session& session, const StoreHello& hello, std::optional<Proof> proof);
  void refuse(Session& session, const Status& why);
  void on_watch(Session& session, const Frame& frame);
  void on_keep_alive(Session& session, const Frame& frame);
  void continue_from(int64_t revision);
  void restore(const Frame& frame);

  void send(uint64_t session, StoreMessage type, std::span<const std::byte> payload);
  void flush_due();
  void publish(std::span<const Event> events);
  void send_events(uint64_t session, uint64_t watch, std::vector<Event> events);
  void drop(uint64_t id, const Status& why);
  void drop_greeting(std::string_view why);
  void update_events(const Session& session);

  void await(const std::vector<Member>& members);
  void stop_awaiting(uint64_t client);
  void begin_gathering();
  void end_gathering();
  void arm_expiry();
  void report_members();
  std::vector<Member> members(bool (*counts)(const Session&)) const;

  const std::string address_;
  const ServerOptions options_;
  const uint64_t instance_ = random_id();
  Listener listener_;
  std::map<uint64_t, std::unique_ptr<Session>> sessions_;
  uint64_t next_session_ = 1;
  std::set<uint64_t> greeting_;  // sessions without a hello, the oldest first
  std::vector<uint64_t> due_;    // sessions with something to flush
  bool flush_posted_ = false;
  std::optional<StateFile> file_;
  State state_;
  Service service_;
  bool gathering_ = false;
  std::map<uint64_t, Awaited> awaited_;  // by client
  EventLoop::TimerId gather_timer_ = 0;
  EventLoop::TimerId expiry_timer_ = 0;
  TimePoint expiry_due_{};
  EventLoop loop_;  // last: ends before the members that its callbacks use
};

}  // namespace tessera::store
