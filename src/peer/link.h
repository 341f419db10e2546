// One session's stream of frames to another agent, on the event loop: it carries messages both ways, and reports the
// peer's death. Many links may share a connection (peer_connection.h).
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

// For messages that the peer answers on its own, without its user and without moving data. If it has answered a Ping
// sent this much later, but not the message, it never will. A slow or stopped peer answers neither, and is waited for.
inline constexpr Duration kAnswerTime = seconds(2);
inline constexpr Duration kSilentTime = seconds(30);  // the limit if it answers neither

class PeerConnection;

// Lives on the loop's thread. Owned by shared_ptr; close() (or the last owner) ends it.
class Link : public std::enable_shared_from_this<Link> {
 public:
  // Called with each frame except Reject and Closed, which end the link. If it throws, because the peer sent something
  // forbidden or asks for the impossible, the link ends with that error, and the peer gets it in a Reject.
  using OnFrame = std::function<void(Frame&)>;
  // Called once, unless close() came first. The status says why the link ended, and names the peer.
  using OnEnd = std::function<void(const Status&)>;
  // Called with a Detach, after which the link is closed. Without this handler on_frame gets the frame.
  using OnDetach = std::function<void(const Detach&)>;
  // Called with the error of a Broken. Without this handler on_frame gets the frame.
  using OnBroken = std::function<void(const Status&)>;

  // The only link of this socket, on stream 0: close() closes the socket.
  static std::shared_ptr<Link> adopt(EventLoop& loop, UniqueFd socket, std::string peer_name);
  ~Link();

  void set_handlers(OnFrame on_frame, OnEnd on_end, OnDetach on_detach = {}, OnBroken on_broken = {});
  const std::string& name() const { return name_; }  // "trainer/3"
  // From now on the connection ends once that process dies, even if its socket lives. Same host and pid namespace only.
  void watch_process(const Incarnation& incarnation);
  // If the peer is a daemon: the process whose agent it is. end_if_stopped() checks it, too.
  void watch_worker(const std::optional<Incarnation>& worker) { worker_ = worker; }
  // Ends the link, and tells the peer, if that process is stopped and nothing has come from it for a while. To be
  // called every kStopPeriod while something waits for the peer.
  void end_if_stopped();
  // Handles everything that has arrived over the connection, and its end, before the loop gets to it.
  void poll();
  void set_limits(FrameLimits limits);

  // From now on kUnavailable is reported as the loss of the peer (kPeerLost). Both sides could try again, but what is
  // in progress over the link cannot wait for that.
  void set_in_use() { in_use_ = true; }

  // Drops the message if the link is not attached yet, since a caller waits for the answer to its Attach.
  template <typename Message>
  void send(const Message& message, std::vector<UniqueFd> fds = {}) {
    outgoing_.clear(kKeptBytes);
    write_fields(message, outgoing_);
    send_bytes(kCode<Message>, outgoing_.view(), std::move(fds));
  }
  // The same for a message that one of `Answers` must answer; else the link ends with kUnavailable (see kAnswerTime).
  template <typename... Answers, typename Message>
  void ask(const Message& message, std::vector<UniqueFd> fds = {}) {
    asked_ = Asked{.what = kNameOf<Message::kType>, .answers = {kCode<Answers>...}, .since = Clock::steady().now()};
    send(message, std::move(fds));
  }
  // Tells the peer the reason and closes. No handler runs afterwards.
  void reject(const Status& reason);
  // Sends as much of the queue as the socket takes now, and closes. The peer is told, unless either side has sent
  // Detach. No handler runs afterwards.
  void close();
  bool open() const { return connection_ != nullptr; }

 private:
  friend class PeerConnection;
  static constexpr size_t kKeptBytes = size_t{256} << 10;  // memory that is kept for the next message

  Link(std::shared_ptr<PeerConnection> connection, std::string name, FrameLimits limits);
  void send_bytes(uint16_t type, std::span<const std::byte> payload, std::vector<UniqueFd> fds);
  void receive(Frame& frame);  // ends the link if a handler throws
  void handle(Frame& frame);
  void end(const Status& status);
  void fail_with(const Status& status);  // the peer's frame caused it
  void reject_and_end(const Status& reason, const Status& status);
  Status as_end(const Status& status) const;
  void end_unanswered(Duration limit);
  // No more frames come or go. The connection has removed this link.
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
  bool told_ = false;    // either end has sent Detach or Reject, or the peer Closed
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
