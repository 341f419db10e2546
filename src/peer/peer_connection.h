// A socket between two processes, and the links whose frames it carries, each on a separate stream. Stream 0 belongs to
// the connection: there both sides say who they are, and when they are done. If a frame is missing, or is not the one
// that was sent, the connection ends. A Ping follows what was sent, so that this is noticed even if nothing else comes.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/event_loop.h"
#include "base/framing.h"
#include "peer/frame_check.h"
#include "peer/handshake.h"
#include "peer/link.h"
#include "peer/message.h"
#include "peer/spoilt_frames.h"

namespace tessera {

// Lives on the loop's thread. Owned by shared_ptr, also by its links; close() ends it and them.
class PeerConnection : public std::enable_shared_from_this<PeerConnection> {
 public:
  enum class Side { kDialed, kAccepted };
  struct Events {
    // A frame on stream 0, except Reject. An exception thrown by the handler ends the connection, and the peer gets it
    // in a Reject.
    std::function<void(Frame&)> on_frame;
    // The peer has opened a link. An exception ends only that link.
    std::function<void(std::shared_ptr<Link>, Attach)> on_attach;
    std::function<void()> on_idle;  // the last link has gone
    std::function<void()> on_end;   // the socket is closed, and the links have been told
  };

  static std::shared_ptr<PeerConnection> adopt(EventLoop& loop, UniqueFd socket, Side side, std::string peer_name);
  // See Link::adopt().
  static std::shared_ptr<Link> adopt_sole(EventLoop& loop, UniqueFd socket, std::string peer_name);
  ~PeerConnection();

  void set_events(Events events);
  void set_name(std::string name) { name_ = std::move(name); }
  const std::string& name() const { return name_; }
  bool open() const { return static_cast<bool>(socket_); }
  bool idle() const { return links_.empty() && pending_.empty(); }
  bool agreed() const { return agreed_ != 0; }
  bool peer_has_attached() const { return peer_streams_ > 0; }
  // Whether another link may be opened: the connection is open, and there are unused streams.
  bool may_attach() const;
  // Sets the version of all frames from now on; a frame of another one ends the connection. Attaches waiting links.
  void agree_on(uint16_t version);
  // Opens a link to the peer. Attach is sent once a version is agreed on. REQUIRES: may_attach()
  std::shared_ptr<Link> attach(std::string name, const Attach& attach, FrameLimits limits);

  // On stream 0.
  template <typename Message>
  void send(const Message& message) {
    say_last(0, kCode<Message>, payload_of(message));
  }
  // Tells the peer the reason and closes. The links end with it, too.
  void reject(const Status& reason);
  void close();  // links are not told, only on_end is called

 private:
  friend class Link;
  enum class Role { kDialed, kAccepted, kSole };

  PeerConnection(EventLoop& loop, UniqueFd socket, Role role, std::string peer_name);
  static std::shared_ptr<PeerConnection> make(EventLoop& loop, UniqueFd socket, Role role, std::string peer_name);

  // --- for links ---
  const Incarnation& process() const { return process_; }
  void watch_process(const Incarnation& incarnation);
  void poll();
  void widen_limits(FrameLimits limits);
  void send_from(Link& link, uint16_t type, std::span<const std::byte> payload, std::vector<UniqueFd> fds);
  void say_last(uint32_t stream, uint16_t type, std::span<const std::byte> payload);
  void say_closed(uint32_t stream);
  void forget(const Link& link);

  bool dials() const { return role_ == Role::kDialed; }
  bool ours(uint32_t stream) const { return (stream % 2 == 1) == dials(); }
  bool was_opened(uint32_t stream) const;
  FrameLimits limits_of(uint32_t stream) const;
  void give_stream(Link& link, const Attach& attach);
  // Counts the frame as sent, and calls `push` to put it on the writer's queue with its check.
  template <typename Push>
  void queue(SpoiltFrames::Sent sent, Push push);
  void queue_last(uint32_t stream, uint16_t type, std::span<const std::byte> payload);  // even if the queue is full
  void flush();
  // --- pings ---
  void follow_up();  // a Ping is sent soon
  void ping();
  void handle_pong(uint32_t number);
  bool awaits_answer() const;  // whether any link does
  void end_unanswered(TimePoint asked_until, Duration limit);
  void handle_events(uint32_t events);
  void handle_death();
  void handle_end();
  void require_next(const Frame& frame);
  void dispatch(Frame& frame);
  void handle_attach(Frame& frame);
  bool read_some();  // false once the peer has ended the stream
  bool read_all();   // the same
  void end(const Status& status);
  void reject_and_end(const Status& reason, const Status& status);
  void close_socket();

  EventLoop& loop_;
  const Role role_;
  UniqueFd socket_;
  UniqueFd pidfd_;
  bool watched_ = false;
  Incarnation process_;
  std::string name_;
  uint16_t agreed_ = 0;            // 0: nothing yet
  EventLoop::TimerId ending_ = 0;  // the peer has closed the socket: waits to see whether it has died
  FrameLimits widest_{.payload_bytes = kMaxHelloBytes, .fds = 0};
  FrameReader reader_;
  FrameWriter writer_;
  Frame incoming_;        // the frame that a handler gets
  bool writing_ = false;  // EPOLLOUT is requested
  struct Pulse {
    FrameCheck sent, read;
    bool said = false;  // something was sent after the last Ping
    uint32_t asked = 0;
    uint32_t answered = 0;
    TimePoint asked_at{};
    EventLoop::TimerId timer = 0;
    SpoiltFrames spoilt;
  };
  Pulse pulse_;
  uint32_t streams_ = 0;  // opened by this side
  uint32_t peer_streams_ = 0;
  std::map<uint32_t, Link*> links_;  // by stream
  std::vector<std::pair<Link*, Attach>> pending_;
  std::shared_ptr<const Events> events_;
};

}  // namespace tessera
