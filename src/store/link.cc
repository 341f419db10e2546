#include "store/link.h"

#include <algorithm>

#include "base/fail.h"
#include "base/log.h"

namespace tessera::store {
namespace {

constexpr Duration kFirstPause = std::chrono::milliseconds(1);
constexpr Duration kGreetingTime = std::chrono::seconds(5);

}  // namespace

Link::~Link() {
  if (fd_) loop_.remove_fd(fd_.get());
  for (const EventLoop::TimerId timer : {retry_timer_, greeting_timer_, flush_timer_}) loop_.cancel_timer(timer);
}

void Link::connect() {
  retry_timer_ = 0;
  try {
    fd_ = connector_->start();
    stage_ = Stage::kConnecting;
    greeting_timer_ = loop_.add_timer_after(kGreetingTime, [this] {
      down(failed(ErrorCode::kUnavailable, "it does not answer a hello within {} s", to_seconds(kGreetingTime)));
    });
    loop_.add_fd(fd_.get(), EPOLLOUT, [this](uint32_t events) { on_events(events); });
  } catch (...) {
    down(status_of_current_exception());
  }
}

void Link::on_events(uint32_t events) {
  try {
    if (stage_ == Stage::kConnecting) return greet();
    if ((events & EPOLLOUT) != 0) flush();
    if ((events & ~uint32_t{EPOLLOUT}) == 0) return;
    const bool open = reader_->fill(fd_.get());
    while (std::optional<Frame> frame = reader_->next()) take(*frame);
    if (!open) fail(ErrorCode::kUnavailable, "it closed the connection");
  } catch (...) {
    down(status_of_current_exception());
  }
}

void Link::greet() {
  connector_->check(fd_.get());
  reader_.emplace(kMagic, FrameLimits{.payload_bytes = kMaxHelloBytes + kMaxHelloBytes});
  writer_.emplace(kMagic, kHelloVersion, kNoQueueLimit);  // bounded by the calls that wait for its replies
  stage_ = Stage::kGreeting;
  writer_->push(raw(MessageType::kHello), callbacks_.hello().encode());
  flush();
}

void Link::take(const Frame& frame) {
  if (stage_ == Stage::kGreeting) return on_welcome(frame);
  ByteReader in(frame.payload, "a message of the store");
  callbacks_.on_frame(static_cast<MessageType>(frame.type), in);
}

void Link::on_welcome(const Frame& frame) {
  if (frame.type == raw(MessageType::kRefused)) {
    ByteReader in(frame.payload, "refusal");
    in.get<uint64_t>();
    read_status(in).throw_if_error();
  }
  if (frame.type != raw(MessageType::kWelcome))
    fail(ErrorCode::kInvalidArgument, "it answers the hello with a message of type {}", frame.type);
  const Welcome welcome = Welcome::decode(frame.payload);
  if (welcome.version < kMinVersion || welcome.version > kMaxVersion)
    fail(ErrorCode::kMismatch, "the store (release {}) chose protocol {}, this release ({}) speaks {} to {}",
         welcome.release, welcome.version, release(), kMinVersion, kMaxVersion);
  loop_.cancel_timer(greeting_timer_);
  reader_->set_limits({.payload_bytes = kMaxReplyBytes + (uint32_t{1} << 20)});
  writer_->set_version(welcome.version);
  stage_ = Stage::kReady;
  pause_ = Duration::zero();
  callbacks_.on_ready(welcome);
}

void Link::send(MessageType type, std::span<const std::byte> payload) {
  writer_->push(raw(type), payload);
  if (flush_timer_ != 0) return;
  flush_timer_ = loop_.add_timer(loop_.clock().now(), [this] {
    flush_timer_ = 0;
    try {
      flush();
    } catch (...) {
      down(status_of_current_exception());
    }
  });
}

void Link::flush() {
  const bool all = writer_->flush(fd_.get());
  loop_.set_events(fd_.get(), all ? EPOLLIN : EPOLLIN | EPOLLOUT);
}

void Link::down(const Status& why) {
  if (fd_) loop_.remove_fd(fd_.get());
  fd_.reset();
  reader_.reset();
  writer_.reset();
  stage_ = Stage::kDown;
  loop_.cancel_timer(greeting_timer_);
  loop_.cancel_timer(std::exchange(flush_timer_, 0));
  const Duration pause = pause_;
  pause_ = std::min(std::max(2 * pause_, kFirstPause), connector_->longest_pause());
  retry_timer_ = loop_.add_timer_after(pause, [this] { connect(); });
  callbacks_.on_down(why);
}

}  // namespace tessera::store
