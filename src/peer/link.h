// One session's stream of frames to another agent, on the event loop: messages both ways, and the peer's death. Many
// may share a connection (peer_connection.h).
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/event_loop.h"
#include "base/framing.h"
#include "base/process.h"
#include "peer/handshake.h"
#include "peer/message.h"
#include "peer/stop_detector.h"

namespace tessera {

// For a message that the peer answers without a user and without moving data. A peer that has answered a Ping sent so
// much later, but not the message, never will. One that is slow or stopped answers neither, and is waited for.
inline constexpr Duration kAnswerTime = seconds(2);
inline constexpr Duration kSilentTime = seconds(30);  // with neither answer

class PeerConnection;

// Lives on the loop's thread. Owned by shared_ptr; close() (or the last owner) ends it.
class Link : public std::enable_shared_from_this<Link> {
 public:
  // Called with each frame but Reject and Closed, which end the link. An exception out of it ends the link with that
  // error: the peer sent something forbidden, or asks for the impossible. A Reject tells it.
  using OnFrame = std::function<void(Frame&)>;
  // Called once, unless close() came first: why the link ended, naming the peer.
  using OnEnd = std::function<void(const Status&)>;
  // Called with a Detach, after which the link is closed. Where it is not given, on_frame gets the frame.
  using OnDetach = std::function<void(const Detach&)>;
  // Called with the error of a Broken; the same.
  using OnBroken = std::function<void(const Status&)>;

  // The only link of a socket of its own, on stream 0: close() closes the socket.
  static std::shared_ptr<Link> adopt(EventLoop& loop, UniqueFd socket, std::string peer_name);
  ~Link();

  void set_handlers(OnFrame on_frame, OnEnd on_end, OnDetach on_detach = {}, OnBroken on_broken = {});
  const std::string& name() const { return name_; }  // "trainer/3"
  // From now on the connection ends at once when that process dies, socket or not. Same host and pid namespace only.
  void watch_process(const Incarnation& incarnation);
  // Whose agent that process is, if it is a daemon: end_if_stopped() looks at it, too.
  void watch_worker(const std::optional<Incarnation>& worker) { worker_ = worker; }
  // Ends, and tells the peer, if that process is stopped and nothing has come from it for a while. To be called every
  // kStopPeriod while something waits for it.
  void end_if_stopped();
  // Handles all that has come over the connection, and its end, now: before the loop gets to it.
  void poll();
  void set_limits(FrameLimits limits);

  // From now on kUnavailable, after which both sides could try again, is reported as the loss of the peer (kPeerLost):
  // what is under way over the link cannot wait for that.
  void set_in_use() { in_use_ = true; }

  // Nothing is sent before the link is attached: a caller waits for the answer.
  template <typename Message>
  void send(const Message& message, std::vector<UniqueFd> fds = {}) {
    outgoing_.clear(kKeptBytes);
    write_fields(message, outgoing_);
    send_bytes(kCode<Message>, outgoing_.view(), std::move(fds));
  }
  // The same for a message that one of these must answer: otherwise the link ends with kUnavailable, see kAnswerTime.
  template <typename... Answers, typename Message>
  void ask(const Message& message, std::vector<UniqueFd> fds = {}) {
    asked_ = Asked{.what = kNameOf<Message::kType>, .answers = {kCode<Answers>...}, .since = Clock::steady().now()};
    send(message, std::move(fds));
  }
  // Tells the peer why and closes. No handler runs afterwards.
  void reject(const Status& reason);
  // Sends what is queued as far as the socket takes it now, and closes: the peer is told, unless either has said
  // Detach. No handler runs afterwards.
  void close();
  bool open() const { return connection_ != nullptr; }

 private:
  friend class PeerConnection;
  static constexpr size_t kKeptBytes = size_t{256} << 10;  // of a message's memory, for the next one

  Link(std::shared_ptr<PeerConnection> connection, std::string name, FrameLimits limits);
  void send_bytes(uint16_t type, std::span<const std::byte> payload, std::vector<UniqueFd> fds);
  void receive(Frame& frame);  // and ends the link with what a handler throws
  void handle(Frame& frame);
  void end(const Status& status);
  void fail_with(const Status& status);  // of what the peer has sent
  void reject_and_end(const Status& reason, const Status& status);
  Status as_end(const Status& status) const;
  void end_unanswered(Duration limit);
  // No frame comes, and none goes, any more. The connection has forgotten it.
  void release();

  std::shared_ptr<PeerConnection> connection_;  // until the end
  std::optional<uint32_t> stream_;              // once it is attached
  FrameLimits limits_;
  std::optional<Incarnation> worker_;
  StopDetector stop_detector_;
  TimePoint heard_ = Clock::steady().now();
  struct Asked {
    std::string_view what;
    std::array<uint16_t, 2> answers{};
    TimePoint since;
  };
  std::optional<Asked> asked_;  // until it is answered
  std::string name_;
  bool in_use_ = false;
  bool told_ = false;    // one end has said Detach or Reject, or the other Closed
  ByteWriter outgoing_;  // the message that is sent
  // Shared, so that a handler that closes its own link is not destroyed while it runs.
  struct Handlers {
    OnFrame on_frame;
    OnEnd on_end;
    OnDetach on_detach;
    OnBroken on_broken;
  };
  std::shared_ptr<const Handlers> handlers_;
};

}  // namespace tessera
