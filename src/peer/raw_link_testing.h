// The other end of a connection between agents, of which a test says and hears every message itself.
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <cerrno>
#include <span>
#include <utility>

#include "base/fields.h"
#include "base/framing.h"
#include "base/socket.h"
#include "base/testing.h"
#include "peer/message.h"

namespace tessera {

// Waits for what it is asked for, at most until soon(); then it throws kDeadlineExceeded.
class RawLink {
 public:
  explicit RawLink(UniqueFd socket, FrameLimits limits = {.payload_bytes = 1 << 20, .fds = 0})
      : socket_(std::move(socket)), reader_(kBusMagic, limits, [limits](uint32_t) { return limits; }) {}

  // What is sent from now on is of that stream; what comes may be of any.
  void set_stream(uint32_t stream) { stream_ = stream; }
  template <typename Message>
  void send(const Message& message) {
    send(kCode<Message>, message_bytes(message));
  }
  void send(uint16_t type, std::span<const std::byte> payload) {
    writer_.push(type, payload, {}, stream_);
    writer_.flush(socket_.get(), soon());
  }
  void send_raw(std::span<const std::byte> bytes) { send_some(socket_.get(), bytes); }

  Frame next_frame() { return wait_frame(socket_.get(), reader_, soon()); }
  // The next message, which is to be of that type.
  template <typename Message>
  Message next() {
    const Frame frame = next_frame();
    EXPECT_EQ(frame.type, kCode<Message>) << kNameOf<Message::kType>;
    return parse<Message>(frame.payload);
  }
  // Up to one of that type, whatever comes before.
  void await(uint16_t type) {
    while (next_frame().type != type) continue;
  }
  // Whether nothing has come.
  bool silent() const {
    char byte = 0;
    return ::recv(socket_.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && errno == EAGAIN;
  }
  void close() { socket_.reset(); }

 private:
  UniqueFd socket_;
  uint32_t stream_ = 0;
  FrameWriter writer_{kBusMagic, kProtocolMax, size_t{1} << 20};
  FrameReader reader_;
};

}  // namespace tessera
