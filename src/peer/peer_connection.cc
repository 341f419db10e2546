#include "peer/peer_connection.h"

#include <sys/ioctl.h>

#include <algorithm>

#include "base/fail.h"
#include "base/log.h"
#include "base/metrics.h"
#include "base/mutation.h"
#include "base/socket.h"

namespace tessera {
namespace {

// A large table may be queued at attach; afterwards only a few messages are.
constexpr size_t kMaxQueuedBytes = size_t{512} << 20;  // of a link
constexpr Duration kDying = seconds(0.02);
constexpr Duration kPingAfter = seconds(0.25);       // from a message to the Ping that follows it
constexpr uint32_t kMaxStreams = uint32_t{1} << 30;  // opened by one side of a connection
// A caller that waits for its session may still send Detach or Broken, with a text.
constexpr FrameLimits kEarlyLimits{.payload_bytes = 66 << 10, .fds = 0};

}  // namespace

std::shared_ptr<PeerConnection> PeerConnection::make(EventLoop& loop, UniqueFd socket, Role role,
                                                     std::string peer_name) {
  std::shared_ptr<PeerConnection> made(new PeerConnection(loop, std::move(socket), role, std::move(peer_name)));
  Metrics::process().connections.add(1);
  const std::weak_ptr<PeerConnection> weak = made;
  loop.add_fd(made->socket_.get(), EPOLLIN, [weak](uint32_t events) {
    if (const auto self = weak.lock()) self->handle_events(events);
  });
  return made;
}

std::shared_ptr<PeerConnection> PeerConnection::adopt(EventLoop& loop, UniqueFd socket, Side side,
                                                      std::string peer_name) {
  const Role role = side == Side::kDialed ? Role::kDialed : Role::kAccepted;
  return make(loop, std::move(socket), role, std::move(peer_name));
}

std::shared_ptr<Link> PeerConnection::adopt_sole(EventLoop& loop, UniqueFd socket, std::string peer_name) {
  const auto connection = make(loop, std::move(socket), Role::kSole, std::move(peer_name));
  std::shared_ptr<Link> link(new Link(connection, connection->name_, connection->widest_));
  link->stream_ = 0;
  connection->links_.emplace(0, link.get());
  return link;
}

PeerConnection::PeerConnection(EventLoop& loop, UniqueFd socket, Role role, std::string peer_name)
    : loop_(loop),
      role_(role),
      socket_(std::move(socket)),
      name_(std::move(peer_name)),
      reader_(kBusMagic, widest_, [this](uint32_t stream) { return limits_of(stream); }),
      writer_(kBusMagic, kProtocolMax, kMaxQueuedBytes) {
  if (role_ != Role::kSole) reader_.take_checks();
}

PeerConnection::~PeerConnection() {
  close_socket();
}

void PeerConnection::set_events(Events events) {
  events_ = std::make_shared<const Events>(std::move(events));
}

// --- streams -------------------------------------------------------------------------------------

bool PeerConnection::may_attach() const {
  return open() && ending_ == 0 && streams_ + pending_.size() < kMaxStreams;
}

bool PeerConnection::was_opened(uint32_t stream) const {
  return stream != 0 && role_ != Role::kSole && stream / 2 + stream % 2 <= (ours(stream) ? streams_ : peer_streams_);
}

// Frames of a stream that this side has closed may still be on their way.
FrameLimits PeerConnection::limits_of(uint32_t stream) const {
  if (const auto it = links_.find(stream); it != links_.end()) return it->second->limits_;
  if (was_opened(stream)) return ours(stream) ? widest_ : FrameLimits{.payload_bytes = kMaxMessageBytes, .fds = 0};
  return {.payload_bytes = kMaxHelloBytes, .fds = 0};
}

// The limits stay wide, so that descriptors that arrive too late are read from the socket, too, and closed.
void PeerConnection::widen_limits(FrameLimits limits) {
  widest_ = {.payload_bytes = std::max(widest_.payload_bytes, limits.payload_bytes),
             .fds = std::max(widest_.fds, limits.fds)};
  reader_.set_limits(widest_);
}

std::shared_ptr<Link> PeerConnection::attach(std::string name, const Attach& attach, FrameLimits limits) {
  TESSERA_CHECK(may_attach());
  std::shared_ptr<Link> link(new Link(shared_from_this(), std::move(name), limits));
  if (agreed())
    give_stream(*link, attach);
  else
    pending_.emplace_back(link.get(), attach);
  return link;
}

// The dialer opens odd streams, the other side even ones, each in ascending order.
void PeerConnection::give_stream(Link& link, const Attach& attach) {
  ++streams_;
  link.stream_ = dials() ? 2 * streams_ - 1 : 2 * streams_;
  links_.emplace(*link.stream_, &link);
  widen_limits(link.limits_);
  link.send(attach);
}

void PeerConnection::agree_on(uint16_t version) {
  agreed_ = version;
  writer_.set_version(version);
  for (const auto& [link, attach] : std::exchange(pending_, {})) give_stream(*link, attach);
}

void PeerConnection::forget(const Link& link) {
  if (link.stream_) links_.erase(*link.stream_);
  std::erase_if(pending_, [&](const auto& waiting) { return waiting.first == &link; });
  if (!open()) return;
  if (role_ == Role::kSole) return close_socket();
  const auto events = events_;
  if (idle() && events && events->on_idle) events->on_idle();
}

// --- sending -------------------------------------------------------------------------------------

void PeerConnection::send_from(Link& link, uint16_t type, std::span<const std::byte> payload,
                               std::vector<UniqueFd> fds) {
  if (!open() || ending_ != 0) return;
  try {
    queue({type, *link.stream_, 0, payload},
          [&](uint16_t check) { writer_.push(type, payload, std::move(fds), *link.stream_, check); });
  } catch (const Error& error) {
    // Reported from the loop, since the caller may be in the middle of a change of state.
    loop_.post([connection = shared_from_this(), to = link.shared_from_this(),
                status = Status(error.code(), fmt::format("{}: {}", link.name_, error.what()))] {
      connection->read_all();  // what the peer sent before still counts
      to->end(status);
    });
    return;
  }
  if (type == kCode<Detach>) link.told_ = true;
  flush();
}

void PeerConnection::say_last(uint32_t stream, uint16_t type, std::span<const std::byte> payload) {
  if (!open() || ending_ != 0) return;
  queue_last(stream, type, payload);
  flush();
}

// If the link is the only one, the end of the socket says so.
void PeerConnection::say_closed(uint32_t stream) {
  if (role_ != Role::kSole) say_last(stream, kCode<Closed>, message_bytes(Closed{}));
}

template <typename Push>
void PeerConnection::queue(SpoiltFrames::Sent sent, Push push) {
  const FrameFault fault = role_ == Role::kSole ? FrameFault::kNone : frame_fault(sent.type);
  if (fault == FrameFault::kUnsaid) return;
  if (sent.type != kCode<Ping> && sent.type != kCode<Pong>) follow_up();
  FrameCheck sum = pulse_.sent;
  sent.check = agreed() ? sum.next(sent.type, sent.stream, sent.payload) : uint16_t{0};
  if (!pulse_.spoilt.spoil(fault, sent, writer_)) push(sent.check);
  pulse_.sent = sum;  // not reached if push() throws: then the frame was not sent
  pulse_.spoilt.follow(fault, sent, writer_);
}

void PeerConnection::queue_last(uint32_t stream, uint16_t type, std::span<const std::byte> payload) {
  queue({type, stream, 0, payload}, [&](uint16_t check) { writer_.push_last(type, payload, stream, check); });
}

void PeerConnection::flush() {
  try {
    const bool flushed = writer_.flush(socket_.get());
    if (flushed == writing_) {
      writing_ = !flushed;
      loop_.set_events(socket_.get(), writing_ ? EPOLLIN | EPOLLOUT : EPOLLIN);
    }
  } catch (const Error& error) {
    const auto self = weak_from_this().lock();  // null in the destructor
    if (!self) return;
    loop_.post([self, status = Status(error.code(), fmt::format("{}: {}", name_, error.what()))] {
      self->read_all();  // what the peer sent before it went still counts
      self->end(status);
    });
  }
}

// --- pings ---------------------------------------------------------------------------------------

void PeerConnection::follow_up() {
  if (role_ == Role::kSole) return;
  pulse_.said = true;
  if (pulse_.timer == 0) pulse_.timer = loop_.add_timer_after(kPingAfter, [this] { ping(); });
}

// Sends no Ping while one is unanswered: a stopped or slow peer has enough to read. A Ping for what is sent in the
// meantime follows after the answer.
void PeerConnection::ping() {
  pulse_.timer = 0;
  if (!open() || ending_ != 0 || !agreed()) return;
  const TimePoint now = Clock::steady().now();
  if (pulse_.asked == pulse_.answered) {
    pulse_.said = false;
    pulse_.asked_at = now;
    return send(Ping{.number = ++pulse_.asked});
  }
  end_unanswered(now, kSilentTime);
  if (open() && awaits_answer()) follow_up();
}

bool PeerConnection::awaits_answer() const {
  return std::ranges::any_of(links_, [](const auto& entry) { return entry.second->asked_.has_value(); });
}

void PeerConnection::end_unanswered(TimePoint asked_until, Duration limit) {
  const std::shared_ptr<PeerConnection> self = shared_from_this();
  std::vector<std::shared_ptr<Link>> silent;
  for (const auto& [stream, link] : links_)
    if (link->asked_ && asked_until - link->asked_->since >= limit) silent.push_back(link->shared_from_this());
  for (const auto& link : silent) link->end_unanswered(limit);
}

// Answers to messages that were sent before the Ping have arrived before the Pong.
void PeerConnection::handle_pong(uint32_t number) {
  if (number != pulse_.asked || number == pulse_.answered)
    fail(ErrorCode::kMismatch, "Pong {} where {} was asked"_message, number, pulse_.asked);
  pulse_.answered = number;
  end_unanswered(pulse_.asked_at, kAnswerTime);
  if (open() && (pulse_.said || awaits_answer())) follow_up();
}

// --- the socket ----------------------------------------------------------------------------------

void PeerConnection::watch_process(const Incarnation& incarnation) {
  if (!open() || std::exchange(watched_, true)) return;
  process_ = incarnation;
  pidfd_ = open_pidfd(incarnation);
  if (!pidfd_) {
    if (liveness_of(incarnation) == Liveness::kDead)
      end(failed(ErrorCode::kPeerLost, "{} ({}) has died"_message, name_, incarnation.to_string()));
    return;  // another pid namespace: only the end of the socket will tell
  }
  const std::weak_ptr<PeerConnection> weak = weak_from_this();
  loop_.add_fd(pidfd_.get(), EPOLLIN, [weak](uint32_t) {
    if (const auto self = weak.lock()) self->handle_death();
  });
}

void PeerConnection::handle_events(uint32_t events) {
  const std::shared_ptr<PeerConnection> self = shared_from_this();  // a handler may drop the last other owner
  if ((events & EPOLLOUT) != 0 && open()) flush();
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) == 0 || !open() || read_some() || !open()) return;
  if (!pidfd_) return handle_end();
  // The kernel closes a dying process's sockets a moment before it reports the death.
  loop_.remove_fd(socket_.get());
  const std::weak_ptr<PeerConnection> weak = weak_from_this();
  ending_ = loop_.add_timer_after(kDying, [weak] {
    if (const auto connection = weak.lock()) connection->handle_end();
  });
}

void PeerConnection::poll() {
  const std::shared_ptr<PeerConnection> self = shared_from_this();
  if (!read_all()) handle_end();
}

void PeerConnection::handle_end() {
  if (open()) end(failed(ErrorCode::kPeerLost, "{} has closed its connection"_message, name_));
}

void PeerConnection::handle_death() {
  const std::shared_ptr<PeerConnection> self = shared_from_this();
  loop_.remove_fd(pidfd_.get());
  read_all();  // what the peer sent before it died still counts
  end(failed(ErrorCode::kPeerLost, "{} has died"_message, name_));
}

// A single read_some() stops after a message with descriptors, and when others should have their turn.
bool PeerConnection::read_all() {
  for (int unread = 1; open() && unread > 0;) {
    if (!read_some()) return false;
    if (open() && ::ioctl(socket_.get(), FIONREAD, &unread) != 0) break;
  }
  return true;
}

bool PeerConnection::read_some() {
  if (!open()) return true;
  try {
    const bool more = reader_.fill(socket_.get());
    while (open() && reader_.next(incoming_)) {
      Frame frame = std::exchange(incoming_, {});  // a handler may poll
      dispatch(frame);
      frame.fds.clear();
      incoming_ = std::move(frame);
    }
    return more;
  } catch (const std::exception&) {
    const Status status = status_of_current_exception();
    if (status.code() == ErrorCode::kPeerLost && idle()) {
      end(status);  // there is no link that it concerns
      return true;
    }
    log_limited_event(LogLevel::warn, "connection.closed", {{"peer", name_}}, "{}", status.message());
    if (status.code() != ErrorCode::kPeerLost) Metrics::process().messages_malformed.add();
    if (!open()) return true;
    // If a message does not parse, that is the peer's mistake, not an invalid argument of the user.
    const ErrorCode code = status.code() == ErrorCode::kInvalidArgument ? ErrorCode::kMismatch : status.code();
    reject_and_end(Status(code, status.message()), Status(code, fmt::format("{}: {}", name_, status.message())));
    return true;
  }
}

// Frames have checks from the Welcome on. Before it, the peer may be of a release that has no checks.
void PeerConnection::require_next(const Frame& frame) {
  const bool checked = agreed() || (dials() && frame.type == kCode<Welcome>);
  if (frame.check != (checked ? pulse_.read.next(frame.type, frame.stream, frame.payload) : 0))
    fail(ErrorCode::kUnavailable,
         "message {} is not the one that was sent next: one was lost, doubled or changed on its way"_message,
         frame.type);
}

void PeerConnection::dispatch(Frame& frame) {
  if (role_ != Role::kSole) require_next(frame);
  if (agreed_ != 0 && frame.version != agreed_)
    fail(ErrorCode::kMismatch, "a frame of protocol {} where {} was agreed on"_message, frame.version, agreed_);
  if (frame.type == kCode<Attach> && role_ != Role::kSole && frame.stream != 0) return handle_attach(frame);
  if (const auto it = links_.find(frame.stream); it != links_.end()) return it->second->receive(frame);
  if (frame.stream != 0) {
    if (was_opened(frame.stream)) return;  // it was sent before the peer knew that the link is closed
    fail(ErrorCode::kMismatch, "message {} on stream {}, which nobody has opened"_message, frame.type, frame.stream);
  }
  if (frame.type == kCode<Ping> && agreed()) return send(Pong{.number = parse<Ping>(frame.payload).number});
  if (frame.type == kCode<Pong> && agreed()) return handle_pong(parse<Pong>(frame.payload).number);
  if (frame.type == kCode<Reject>) {
    const Reject reject = parse<Reject>(frame.payload);
    return end(failed(reject.code, "{} refuses the connection: {}"_message, name_, reject.text));
  }
  const auto events = events_;
  if (events) events->on_frame(frame);
}

void PeerConnection::handle_attach(Frame& frame) {
  const uint64_t next = 2 * (uint64_t{peer_streams_} + 1) - (dials() ? 0 : 1);
  if (!agreed() || frame.stream != next || peer_streams_ == kMaxStreams)
    fail(ErrorCode::kMismatch, "Attach on stream {} out of turn"_message, frame.stream);
  ++peer_streams_;
  const std::shared_ptr<Link> link(new Link(shared_from_this(), name_, kEarlyLimits));
  link->stream_ = frame.stream;
  links_.emplace(frame.stream, link.get());
  const auto events = events_;
  try {
    events->on_attach(link, parse<Attach>(frame.payload));
  } catch (const std::exception&) {
    link->fail_with(status_of_current_exception());
  }
}

// --- the end -------------------------------------------------------------------------------------

void PeerConnection::reject(const Status& reason) {
  reject_and_end(reason, Status(reason.code(), fmt::format("{}: {}", name_, reason.message())));
}

void PeerConnection::reject_and_end(const Status& reason, const Status& status) {
  if (!open()) return;
  queue_last(0, kCode<Reject>, message_bytes(Reject{.code = reason.code(), .text = reason.message()}));
  end(status);
}

void PeerConnection::end(const Status& status) {
  if (!open()) return;
  const std::shared_ptr<PeerConnection> self = shared_from_this();
  const auto events = events_;
  close_socket();
  std::vector<std::shared_ptr<Link>> ended;  // a handler may close others
  for (const auto& [stream, link] : links_) ended.push_back(link->shared_from_this());
  for (const auto& [link, attach] : pending_) ended.push_back(link->shared_from_this());
  for (const auto& link : ended) link->end(status);
  if (events && events->on_end) events->on_end();
}

void PeerConnection::close() {
  if (!open()) return;
  const std::shared_ptr<PeerConnection> self = shared_from_this();
  const auto events = events_;
  close_socket();
  for (const auto& [stream, link] : std::exchange(links_, {})) link->release();
  for (const auto& [link, attach] : std::exchange(pending_, {})) link->release();
  if (events && events->on_end) events->on_end();
}

void PeerConnection::close_socket() {
  if (!open()) return;
  try {
    writer_.flush(socket_.get());
  } catch (const Error&) {
    // The peer has gone: there is nobody to tell.
  }
  loop_.cancel_timer(ending_);
  loop_.cancel_timer(pulse_.timer);
  loop_.remove_fd(socket_.get());
  if (pidfd_) loop_.remove_fd(pidfd_.get());
  pidfd_.reset();
  socket_.reset();
  Metrics::process().connections.add(-1);
  // Closes descriptors that were received, or were still to be sent.
  reader_ = FrameReader(kBusMagic, {});
  writer_ = FrameWriter(kBusMagic, kProtocolMax, kMaxQueuedBytes);
  events_.reset();
}

}  // namespace tessera
