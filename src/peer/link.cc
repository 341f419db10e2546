#include "peer/link.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "base/message.h"
#include "base/metrics.h"
#include "peer/peer_connection.h"

namespace tessera {

std::shared_ptr<Link> Link::adopt(EventLoop& loop, UniqueFd socket, std::string peer_name) {
  return PeerConnection::adopt_sole(loop, std::move(socket), std::move(peer_name));
}

Link::Link(std::shared_ptr<PeerConnection> connection, std::string name, FrameLimits limits)
    : connection_(std::move(connection)), limits_(limits), name_(std::move(name)) {}

Link::~Link() {
  close();
}

void Link::set_handlers(OnFrame on_frame, OnEnd on_end, OnDetach on_detach, OnBroken on_broken) {
  handlers_ = std::make_shared<const Handlers>(
      Handlers{std::move(on_frame), std::move(on_end), std::move(on_detach), std::move(on_broken)});
}

void Link::watch_process(const Incarnation& incarnation) {
  if (const auto connection = connection_) connection->watch_process(incarnation);
}

void Link::set_limits(FrameLimits limits) {
  limits_ = limits;
  if (connection_ && stream_) connection_->widen_limits(limits);
}

void Link::end_if_stopped() {
  if (!open() || Clock::steady().now() - heard_ < kSilence) return;
  const Status status = stop_detector_.look(name_, connection_->process(), worker_);
  if (!status.ok()) reject_and_end(status, status);
}

void Link::poll() {
  if (const auto connection = connection_) connection->poll();
}

void Link::send_bytes(uint16_t type, std::span<const std::byte> payload, std::vector<UniqueFd> fds) {
  if (!open() || !stream_) return;
  connection_->send_from(*this, type, payload, std::move(fds));
}

void Link::receive(Frame& frame) {
  const std::shared_ptr<Link> self = shared_from_this();  // a handler may drop the last other owner
  try {
    heard_ = Clock::steady().now();
    handle(frame);
  } catch (const std::exception&) {
    fail_with(status_of_current_exception());
  }
}

void Link::handle(Frame& frame) {
  if (frame.type == kCode<Reject>) {
    const Reject reject = parse<Reject>(frame.payload);
    told_ = true;
    return end(failed(reject.code, "{} refuses the connection: {}"_message, name_, reject.text));
  }
  if (frame.type == kCode<Closed>) {
    (void)parse<Closed>(frame.payload);
    told_ = true;
    return end(failed(ErrorCode::kPeerLost, "{} has closed its connection"_message, name_));
  }
  if (asked_ && std::ranges::count(asked_->answers, frame.type) != 0) asked_.reset();
  const auto handlers = handlers_;
  if (!handlers) return;
  if (frame.type == kCode<Detach>) {
    const Detach detach = parse<Detach>(frame.payload);
    told_ = true;
    if (!handlers->on_detach) return handlers->on_frame(frame);
    close();
    return handlers->on_detach(detach);
  }
  if (frame.type == kCode<Broken> && handlers->on_broken)
    return handlers->on_broken(parse<Broken>(frame.payload).status);
  handlers->on_frame(frame);
}

void Link::fail_with(const Status& status) {
  log_event(LogLevel::warn, "connection.closed", {{"peer", name_}}, "{}", status.message());
  if (status.code() != ErrorCode::kPeerLost) Metrics::process().messages_malformed.add();
  if (!open()) return;
  // If a message does not parse, that is the peer's mistake, not an invalid argument of the user.
  const ErrorCode code = status.code() == ErrorCode::kInvalidArgument ? ErrorCode::kMismatch : status.code();
  reject_and_end(Status(code, status.message()), Status(code, fmt::format("{}: {}", name_, status.message())));
}

void Link::reject(const Status& reason) {
  if (!open()) return;
  if (stream_ && !std::exchange(told_, true))
    connection_->say_last(*stream_, kCode<Reject>,
                          message_bytes(Reject{.code = reason.code(), .text = reason.message()}));
  close();
}

void Link::reject_and_end(const Status& reason, const Status& status) {
  const std::shared_ptr<const Handlers> handlers = handlers_;
  reject(reason);
  if (handlers) handlers->on_end(as_end(status));
}

Status Link::as_end(const Status& status) const {
  const bool lost = in_use_ && status.code() == ErrorCode::kUnavailable;
  return lost ? Status(ErrorCode::kPeerLost, status.message()) : status;
}

void Link::end_unanswered(Duration limit) {
  if (!open() || !asked_) return;
  const Asked asked = *asked_;
  const Status status = failed(ErrorCode::kUnavailable, "{} has not answered {} within {} s"_message, name_, asked.what,
                               to_seconds(limit));
  log_event(LogLevel::warn, "connection.closed", {{"peer", name_}}, "{}", status.message());
  reject_and_end(
      failed(ErrorCode::kUnavailable, "{} was not answered within {} s"_message, asked.what, to_seconds(limit)),
      status);
}

void Link::end(const Status& status) {
  if (!open()) return;
  const std::shared_ptr<const Handlers> handlers = handlers_;
  close();
  if (handlers) handlers->on_end(as_end(status));
}

void Link::close() {
  if (!open()) return;
  const std::shared_ptr<PeerConnection> connection = connection_;
  if (stream_ && !std::exchange(told_, true)) connection->say_closed(*stream_);
  release();
  connection->forget(*this);
}

void Link::release() {
  connection_.reset();
  handlers_.reset();
}

}  // namespace tessera
