// Bytes from one producer to one consumer in another process that may not, or should not, read the producer's memory
// itself. Transport::streams() tells whether a transport has streams.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"
#include "tessera/error.h"

namespace tessera {

// One side of a stream, which is reused for many transfers. Data travels in frames whose sizes both sides know
// beforehand. Used by one thread at a time; any thread may call interrupt() and status().
class ByteStream {
 public:
  static constexpr size_t kFrameBytes = size_t{128} << 10;  // the most

  ByteStream() = default;
  virtual ~ByteStream() = default;
  ByteStream(const ByteStream&) = delete;
  ByteStream& operator=(const ByteStream&) = delete;

  virtual std::string_view name() const = 0;  // for messages: "socket stream"

  // Each side begins every transfer with a number above 0 that both know and that differs from the last one, so that
  // frames of an aborted transfer can be told apart. Resets interrupt().
  virtual void begin_produce(uint32_t epoch) = 0;
  virtual void begin_consume(uint32_t epoch) = 0;

  // Producer: room for a frame of kFrameBytes, once the consumer has begun this transfer, too. Empty if interrupted or
  // at the deadline: status() says which.
  virtual std::span<std::byte> reserve(const Deadline& deadline) = 0;
  virtual void publish(size_t bytes) = 0;  // hands over the first `bytes` of the last reservation

  // Consumer: the next frame. Empty if interrupted, at the deadline, or if the producer broke the protocol: see
  // status().
  virtual std::span<const std::byte> acquire(const Deadline& deadline) = 0;
  virtual void release() = 0;  // returns the last acquired frame

  // Ends this side's wait, now or later, with `status` (the first one is kept until the next transfer begins).
  virtual void interrupt(const Status& status) = 0;
  virtual Status status() const = 0;
};

// Opens one side of a stream, in this process or in one that it is sent to: descriptors that mean something only to the
// transport that made them.
struct StreamEnd {
  std::string transport{};  // the transport's name
  std::vector<UniqueFd> fds{};
  StreamEnd duplicate() const;
};

// A transport's streams (TransportRegistry::make_stream() and open_stream()). Thread-safe.
class Streams {
 public:
  struct Ends {
    StreamEnd producer;
    StreamEnd consumer;
  };
  virtual ~Streams() = default;
  // Throws Error(kResourceExhausted).
  virtual Ends make() const = 0;
  // Opens an end that came from `owner`. Throws Error(kInvalidArgument) if it is not a valid end.
  virtual std::unique_ptr<ByteStream> open(StreamEnd end, std::string_view owner) const = 0;
};

}  // namespace tessera
