#include "store/client/store_link.h"

#include <algorithm>

#include "base/fail.h"
#include "base/log.h"

namespace tessera::store {
namespace {

constexpr Duration kFirstPause = std::chrono::milliseconds(1);
constexpr Duration kGreetingTime = std::chrono::seconds(5);

void check_version(uint16_t version, std::string_view other) {
  if (version < kMinVersion || version > kMaxVersion)
    fail(ErrorCode::kMismatch, "the store (release {}) chose protocol {}, this release ({}) speaks {} to {}"_message,
         other, version, release(), kMinVersion, kMaxVersion);
}

}  // namespace

StoreLink::~StoreLink() {
  if (fd_) loop_.remove_fd(fd_.get());
  for (const EventLoop::TimerId timer : {retry_timer_, greeting_timer_, flush_timer_}) loop_.cancel_timer(timer);
}

void StoreLink::connect() {
  retry_timer_ = 0;
  try {
    fd_ = connector_->start();
    stage_ = Stage::kConnecting;
    greeting_timer_ = loop_.add_timer_after(kGreetingTime, [this] {
      down(
          failed(ErrorCode::kUnavailable, "it does not answer a hello within {} s"_message, to_seconds(kGreetingTime)));
    });
    loop_.add_fd(fd_.get(), EPOLLOUT, [this](uint32_t events) { on_events(events); });
  } catch (...) {
    down(status_of_current_exception());
  }
}

void StoreLink::on_events(uint32_t events) {
  try {
    if (stage_ == Stage::kConnecting) return greet();
    if ((events & EPOLLOUT) != 0) flush();
    if ((events & ~uint32_t{EPOLLOUT}) == 0) return;
    const bool open = reader_->fill(fd_.get());
    while (std::optional<Frame> frame = reader_->next()) take(*frame);
    if (!open) fail(ErrorCode::kUnavailable, "it closed the connection"_message);
  } catch (...) {
    down(status_of_current_exception());
  }
}

void StoreLink::greet() {
  connector_->check(fd_.get());
  reader_.emplace(kMagic, FrameLimits{.payload_bytes = kMaxHelloBytes + kMaxHelloBytes});
  writer_.emplace(kMagic, kHelloVersion, kNoQueueLimit);  // limited by the calls that wait for replies
  stage_ = Stage::kGreeting;
  StoreHello hello = callbacks_.hello();
  hello.nonce = random_nonce();
  handshake_ = {.client = hello.nonce};
  writer_->push(raw(StoreMessage::kHello), message_bytes(hello));
  flush();
}

void StoreLink::take(const Frame& frame) {
  if (stage_ == Stage::kGreeting) return on_greeting(frame);
  ByteReader in(frame.payload, "a message of the store");
  callbacks_.on_frame(static_cast<StoreMessage>(frame.type), in);
}

void StoreLink::on_greeting(const Frame& frame) {
  switch (static_cast<StoreMessage>(frame.type)) {
    case StoreMessage::kRefused: {
      ByteReader in(frame.payload, "refusal");
      const Status status = read_fields<ReplyHead>(in).status;
      if (status.code() == ErrorCode::kPermissionDenied && token_)
        fail(status.code(),
             "it does not accept the token from {}: the store was given another one (TESSERA_TOKEN)"_message,
             token_->source());
      return status.throw_if_error();
    }
    case StoreMessage::kChallenge:
      return on_challenge(frame);
    case StoreMessage::kWelcome:
      return on_welcome(frame);
    default:
      fail(ErrorCode::kInvalidArgument, "it answers the hello with a message of type {}"_message, frame.type);
  }
}

void StoreLink::on_challenge(const Frame& frame) {
  const Challenge challenge = decode<Challenge>(frame.payload);
  check_version(challenge.version, challenge.release);
  if (handshake_.version != 0) fail(ErrorCode::kInvalidArgument, "it sends a second challenge"_message);
  token_ = connector_->token(fd_.get());
  if (!token_) fail(ErrorCode::kInvalidArgument, "it demands a token over a Unix socket"_message);
  handshake_.version = challenge.version;
  handshake_.server = challenge.nonce;
  writer_->push(raw(StoreMessage::kProof), message_bytes(ProofAnswer{token_->prove(Side::kClient, handshake_)}));
  flush();
}

void StoreLink::on_welcome(const Frame& frame) {
  const StoreWelcome welcome = decode<StoreWelcome>(frame.payload);
  check_version(welcome.version, welcome.release);
  const std::optional<Token> token = token_ ? std::exchange(token_, std::nullopt) : connector_->token(fd_.get());
  const bool proved = welcome.proof && welcome.version == handshake_.version && token &&
                      token->proves(Side::kServer, handshake_, *welcome.proof);
  if (token && !proved)
    fail(ErrorCode::kPermissionDenied,
         "the server there does not know the token from {}: it is not the expected store"_message, token->source());
  loop_.cancel_timer(greeting_timer_);
  reader_->set_limits({.payload_bytes = kMaxReplyBytes + (uint32_t{1} << 20)});
  writer_->set_version(welcome.version);
  stage_ = Stage::kReady;
  pause_ = Duration::zero();
  callbacks_.on_ready(welcome);
}

void StoreLink::send(StoreMessage type, std::span<const std::byte> payload) {
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

void StoreLink::flush() {
  const bool all = writer_->flush(fd_.get());
  loop_.set_events(fd_.get(), all ? EPOLLIN : EPOLLIN | EPOLLOUT);
}

void StoreLink::down(const Status& why) {
  if (fd_) loop_.remove_fd(fd_.get());
  fd_.reset();
  reader_.reset();
  writer_.reset();
  token_.reset();
  stage_ = Stage::kDown;
  loop_.cancel_timer(greeting_timer_);
  loop_.cancel_timer(std::exchange(flush_timer_, 0));
  const Duration pause = pause_;
  pause_ = std::min(std::max(2 * pause_, kFirstPause), connector_->longest_pause());
  retry_timer_ = loop_.add_timer_after(pause, [this] { connect(); });
  callbacks_.on_down(why);
}

}  // namespace tessera::store
