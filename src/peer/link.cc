#include "peer/link.h"

#include <sys/ioctl.h>

#include "base/log.h"
#include "base/metrics.h"
#include "peer/identity.h"

namespace tessera {
namespace {

constexpr size_t kMaxQueuedBytes = size_t{512}
                                   << 20;  // attaching may queue a large table; steady state, a few messages
constexpr Duration kDying = seconds(0.02);

}  // namespace

std::shared_ptr<Link> Link::adopt(EventLoop& loop, UniqueFd socket, std::string peer_name) {
  std::shared_ptr<Link> link(new Link(loop, std::move(socket), std::move(peer_name)));
  Metrics::process().connections.add(1);
  const std::weak_ptr<Link> weak = link;
  loop.add_fd(link->socket_.get(), EPOLLIN, [weak](uint32_t events) {
    if (const auto self = weak.lock()) self->handle_events(events);
  });
  return link;
}

Link::Link(EventLoop& loop, UniqueFd socket, std::string peer_name)
    : loop_(loop),
      socket_(std::move(socket)),
      name_(std::move(peer_name)),
      reader_(kBusMagic, {.payload_bytes = kMaxHelloBytes, .fds = 0}),
      writer_(kBusMagic, kProtocolMax, kMaxQueuedBytes) {}

Link::~Link() {
  close();
}

void Link::set_handlers(OnFrame on_frame, OnEnd on_end, OnDetach on_detach, OnBroken on_broken) {
  handlers_ = std::make_shared<const Handlers>(
      Handlers{std::move(on_frame), std::move(on_end), std::move(on_detach), std::move(on_broken)});
}

void Link::watch_process(const Incarnation& incarnation) {
  process_ = incarnation;
  pidfd_ = open_pidfd(incarnation);
  if (!pidfd_) {
    if (liveness_of(incarnation) == Liveness::kDead)
      end(failed(ErrorCode::kPeerLost, "{} ({}) has died", name_, incarnation.to_string()));
    return;  // another pid namespace: the socket's end must do
  }
  const std::weak_ptr<Link> weak = weak_from_this();
  loop_.add_fd(pidfd_.get(), EPOLLIN, [weak](uint32_t) {
    if (const auto self = weak.lock()) self->handle_death();
  });
}

void Link::agree_on(uint16_t version) {
  agreed_ = version;
  writer_.set_version(version);
}

void Link::end_if_stopped() {
  if (!open() || Clock::steady().now() - heard_ < kSilence) return;
  const Status status = stop_detector_.look(name_, process_, worker_);
  if (!status.ok()) reject_and_end(status, status);
}

void Link::send_bytes(uint16_t type, std::span<const std::byte> payload, std::vector<UniqueFd> fds) {
  if (!open() || ending_ != 0) return;
  try {
    writer_.push(type, payload, std::move(fds));
    const bool flushed = writer_.flush(socket_.get());
    if (flushed == writing_) {
      writing_ = !flushed;
      loop_.set_events(socket_.get(), writing_ ? EPOLLIN | EPOLLOUT : EPOLLIN);
    }
  } catch (const Error& error) {
    // Told from the loop, not from within the caller's own change of state.
    loop_.post([self = shared_from_this(), status = Status(error.code(), fmt::format("{}: {}", name_, error.what()))] {
      self->read_all();  // what it said before it went still counts
      self->end(status);
    });
  }
}

void Link::handle_events(uint32_t events) {
  const std::shared_ptr<Link> self = shared_from_this();  // a handler may drop the last other owner
  if ((events & EPOLLOUT) != 0 && open()) {
    try {
      if (writer_.flush(socket_.get()) && writing_) {
        writing_ = false;
        loop_.set_events(socket_.get(), EPOLLIN);
      }
    } catch (const Error& error) {
      read_all();
      end(Status(error.code(), fmt::format("{}: {}", name_, error.what())));
      return;
    }
  }
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) == 0 || !open() || read_some() || !open()) return;
  if (!pidfd_) return handle_end();
  // The kernel closes a dying process's sockets a moment before it says that it has died.
  loop_.remove_fd(socket_.get());
  const std::weak_ptr<Link> weak = weak_from_this();
  ending_ = loop_.add_timer_after(kDying, [weak] {
    if (const auto link = weak.lock()) link->handle_end();
  });
}

void Link::poll() {
  const std::shared_ptr<Link> self = shared_from_this();
  if (!read_all()) handle_end();
}

void Link::handle_end() {
  if (open()) end(failed(ErrorCode::kPeerLost, "{} has closed its connection", name_));
}

void Link::handle_death() {
  const std::shared_ptr<Link> self = shared_from_this();
  loop_.remove_fd(pidfd_.get());
  read_all();  // what it said before it died still counts
  end(failed(ErrorCode::kPeerLost, "{} has died", name_));
}

// One read ends after a message with descriptors, and where others are to have their turn.
bool Link::read_all() {
  for (int unread = 1; open() && unread > 0;) {
    if (!read_some()) return false;
    if (open() && ::ioctl(socket_.get(), FIONREAD, &unread) != 0) break;
  }
  return true;
}

bool Link::read_some() {
  if (!open()) return true;
  try {
    const bool more = reader_.fill(socket_.get());
    heard_ = Clock::steady().now();
    while (open() && reader_.next(incoming_)) handle_frame(incoming_);
    return more;
  } catch (const std::exception&) {
    const Status status = status_of_current_exception();
    log_event(LogLevel::warn, "connection.closed", {{"peer", name_}}, "{}", status.message());
    if (status.code() != ErrorCode::kPeerLost) Metrics::process().messages_malformed.add();
    if (!open()) return true;
    // What does not parse is the peer's mistake, not an argument of the user's.
    const ErrorCode code = status.code() == ErrorCode::kInvalidArgument ? ErrorCode::kMismatch : status.code();
    reject_and_end(Status(code, status.message()), Status(code, fmt::format("{}: {}", name_, status.message())));
    return true;
  }
}

void Link::handle_frame(Frame& frame) {
  if (agreed_ != 0 && frame.version != agreed_)
    fail(ErrorCode::kMismatch, "a frame of protocol {} where {} was agreed on", frame.version, agreed_);
  if (frame.type == kCode<Reject>) {
    const Reject reject = parse<Reject>(frame.payload);
    return end(failed(reject.code, "{} refuses the connection: {}", name_, reject.text));
  }
  if (greeting_) return std::exchange(greeting_, nullptr)(frame);
  const auto handlers = handlers_;
  if (!handlers) return;
  if (frame.type == kCode<Detach> && handlers->on_detach) {
    const Detach detach = parse<Detach>(frame.payload);
    close();
    return handlers->on_detach(detach);
  }
  if (frame.type == kCode<Broken> && handlers->on_broken)
    return handlers->on_broken(parse<Broken>(frame.payload).status);
  handlers->on_frame(frame);
}

void Link::reject(const Status& reason) {
  if (!open()) return;
  try {
    writer_.push(kCode<Reject>, message_bytes(Reject{.code = reason.code(), .text = reason.message()}));
  } catch (const Error&) {
    // The peer does not read: it will find the connection closed.
  }
  close();
}

void Link::reject_and_end(const Status& reason, const Status& status) {
  const std::shared_ptr<const Handlers> handlers = handlers_;
  reject(reason);
  if (handlers) handlers->on_end(status);
}

void Link::end(const Status& status) {
  if (!open()) return;
  const std::shared_ptr<const Handlers> handlers = handlers_;
  close();
  if (handlers) handlers->on_end(status);
}

void Link::close() {
  if (!open()) return;
  try {
    writer_.flush(socket_.get());
  } catch (const Error&) {
    // The peer has gone: nobody is left to tell.
  }
  loop_.cancel_timer(ending_);
  loop_.remove_fd(socket_.get());
  if (pidfd_) loop_.remove_fd(pidfd_.get());
  pidfd_.reset();
  socket_.reset();
  Metrics::process().connections.add(-1);
  handlers_.reset();
}

}  // namespace tessera
