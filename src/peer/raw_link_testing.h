// The other end of a connection between agents: a test writes and reads every message itself.
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <cerrno>
#include <optional>
#include <span>
#include <utility>

#include "base/fields.h"
#include "base/framing.h"
#include "base/socket.h"
#include "base/testing.h"
#include "peer/frame_check.h"
#include "peer/handshake.h"
#include "peer/message.h"

namespace tessera {

// Each call that reads waits until soon() at most; then it throws kDeadlineExceeded.
class RawLink {
 public:
  explicit RawLink(UniqueFd socket, FrameLimits limits = {.payload_bytes = 1 << 20, .fds = 0})
      : socket_(std::move(socket)), reader_(kBusMagic, limits, [limits](uint32_t) { return limits; }) {
    reader_.take_checks();
  }

  // Messages that are sent from now on go to that stream. Received ones may be of any stream.
  void set_stream(uint32_t stream) { stream_ = stream; }
  template <typename Message>
  void send(const Message& message) {
    send(kCode<Message>, payload_of(message));
  }
  void send(uint16_t type, std::span<const std::byte> payload) { send_on(stream_, type, payload); }
  void send_raw(std::span<const std::byte> bytes) { send_some(socket_.get(), bytes); }

  // The next frame that is not a Ping. Answers the Pings before it.
  Frame next_frame() {
    for (;;) {
      Frame frame = wait_frame(socket_.get(), reader_, soon());
      if (frame.type == kCode<Welcome>) check_.emplace();
      if (frame.type != kCode<Ping>) return frame;
      send_on(0, kCode<Pong>, frame.payload);
    }
  }
  // The next message, which must be of that type.
  template <typename Message>
  Message next() {
    const Frame frame = next_frame();
    EXPECT_EQ(frame.type, kCode<Message>) << kNameOf<Message::kType>;
    return parse<Message>(frame.payload);
  }
  // Reads frames up to one of that type.
  void await(uint16_t type) {
    while (next_frame().type != type) continue;
  }
  // Whether nothing has arrived.
  bool silent() const {
    char byte = 0;
    return ::recv(socket_.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && errno == EAGAIN;
  }
  void close() { socket_.reset(); }

 private:
  void send_on(uint32_t stream, uint16_t type, std::span<const std::byte> payload) {
    writer_.push(type, payload, {}, stream, check_ ? check_->next(type, stream, payload) : uint16_t{0});
    writer_.flush(socket_.get(), soon());
  }

  UniqueFd socket_;
  uint32_t stream_ = 0;
  std::optional<FrameCheck> check_;  // from the Welcome on
  FrameWriter writer_{kBusMagic, kProtocolMax, size_t{1} << 20};
  FrameReader reader_;
};

}  // namespace tessera
