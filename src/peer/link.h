// A connection between two agents, on the event loop: messages both ways, and the peer's death.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/event_loop.h"
#include "base/framing.h"
#include "peer/handshake.h"
#include "peer/message.h"
#include "peer/stop_detector.h"

namespace tessera {

// Lives on the loop's thread. Owned by shared_ptr; close() (or the last owner) ends it.
class Link : public std::enable_shared_from_this<Link> {
 public:
  // Called with each frame but Reject, which ends the link. An exception out of it closes the link with that error: the
  // peer sent what it must not, or asks for what cannot be. The peer is told by a Reject.
  using OnFrame = std::function<void(Frame&)>;
  // Called once, unless close() came first: why the connection ended, naming the peer.
  using OnEnd = std::function<void(const Status&)>;
  // Called with a Detach, after which the link is closed. Where it is not given, on_frame gets the frame.
  using OnDetach = std::function<void(const Detach&)>;
  // Called with what a Broken says; likewise.
  using OnBroken = std::function<void(const Status&)>;

  static std::shared_ptr<Link> adopt(EventLoop& loop, UniqueFd socket, std::string peer_name);
  ~Link();

  void set_handlers(OnFrame on_frame, OnEnd on_end, OnDetach on_detach = {}, OnBroken on_broken = {});
  // The first frame that comes goes to `greeting` in place of the handler; what it throws ends the link likewise.
  void set_greeting(OnFrame greeting) { greeting_ = std::move(greeting); }
  void set_name(std::string name) { name_ = std::move(name); }
  const std::string& name() const { return name_; }  // "trainer/3"
  // From now on ends at once when that process dies, socket or not. Same host and pid namespace only.
  void watch_process(const Incarnation& incarnation);
  // Whose agent that process is, if it is a daemon: end_if_stopped() looks at it, too.
  void watch_worker(const std::optional<Incarnation>& worker) { worker_ = worker; }
  // Ends, and tells the peer, if that process is stopped and nothing has come from it for a while. To be called every
  // kStopPeriod while something waits for it.
  void end_if_stopped();
  // Handles all that has come, and the end of the connection, now: before the loop gets to it.
  void poll();
  // The protocol version of all frames from now on: another one ends the link.
  void agree_on(uint16_t version);
  void set_limits(FrameLimits limits) { reader_.set_limits(limits); }

  template <typename Message>
  void send(const Message& message, std::vector<UniqueFd> fds = {}) {
    outgoing_.clear(kKeptBytes);
    write_fields(message, outgoing_);
    send_bytes(kCode<Message>, outgoing_.view(), std::move(fds));
  }
  // Tells the peer why and closes. No handler runs afterwards.
  void reject(const Status& reason);
  // Sends what is queued as far as the socket takes it now, and closes. No handler runs afterwards.
  void close();
  bool open() const { return static_cast<bool>(socket_); }

 private:
  static constexpr size_t kKeptBytes = size_t{256} << 10;  // of a message's memory, for the next one

  Link(EventLoop& loop, UniqueFd socket, std::string peer_name);
  void send_bytes(uint16_t type, std::span<const std::byte> payload, std::vector<UniqueFd> fds);
  void handle_events(uint32_t events);
  void handle_death();
  void handle_end();
  void handle_frame(Frame& frame);
  bool read_some();  // false once the peer has ended the stream
  bool read_all();   // likewise
  void end(const Status& status);
  void reject_and_end(const Status& reason, const Status& status);

  EventLoop& loop_;
  UniqueFd socket_;
  UniqueFd pidfd_;
  Incarnation process_;
  std::optional<Incarnation> worker_;
  StopDetector stop_detector_;
  TimePoint heard_ = Clock::steady().now();
  std::string name_;
  uint16_t agreed_ = 0;            // 0: nothing yet
  EventLoop::TimerId ending_ = 0;  // the peer has ended the stream; has it died?
  FrameReader reader_;
  FrameWriter writer_;
  Frame incoming_;        // the frame that a handler sees
  ByteWriter outgoing_;   // the message that is sent
  bool writing_ = false;  // EPOLLOUT is asked for
  // Shared, so that a handler that closes its own link is not destroyed while it runs.
  struct Handlers {
    OnFrame on_frame;
    OnEnd on_end;
    OnDetach on_detach;
    OnBroken on_broken;
  };
  OnFrame greeting_;
  std::shared_ptr<const Handlers> handlers_;
};

}  // namespace tessera
