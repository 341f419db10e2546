// Bytes from one producer to one consumer of another process that may not, or should not, read the producer's memory
// itself. A transport that has streams says so by Transport::streams().
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

// One side's hold on a stream, which is used again and again. It goes frame by frame; both sides know the sizes of
// frames beforehand. Used by one thread at a time; interrupt() and status() may be called from any.
class ByteStream {
 public:
  static constexpr size_t kFrameBytes = size_t{128} << 10;  // at most

  ByteStream() = default;
  virtual ~ByteStream() = default;
  ByteStream(const ByteStream&) = delete;
  ByteStream& operator=(const ByteStream&) = delete;

  virtual std::string_view name() const = 0;  // what it is, for messages: "socket stream"

  // Each side begins every transfer with a number above 0 that both know and that differs from the last one's: frames
  // of an aborted transfer are then told apart. Forgets interrupt().
  virtual void begin_produce(uint32_t epoch) = 0;
  virtual void begin_consume(uint32_t epoch) = 0;

  // Producer: room for a frame of kFrameBytes, once the consumer has begun this transfer too. Empty if interrupted or
  // at the deadline: status() says which.
  virtual std::span<std::byte> reserve(const Deadline& deadline) = 0;
  virtual void publish(size_t bytes) = 0;  // hands over the first `bytes` of what was reserved last

  // Consumer: the next frame. Empty if interrupted, at the deadline, or if the producer sent nonsense: see status().
  virtual std::span<const std::byte> acquire(const Deadline& deadline) = 0;
  virtual void release() = 0;  // gives back the frame last acquired

  // Ends this side's wait, under way or to come, with `status` (the first one stays until the next transfer begins).
  virtual void interrupt(const Status& status) = 0;
  virtual Status status() const = 0;
};

// What opens one side of a stream, in this process or in one that it is sent to: descriptors that say nothing to anyone
// but the transport that made them.
struct StreamEnd {
  std::string transport{};  // its name
  std::vector<UniqueFd> fds{};
  StreamEnd duplicate() const;
};

// Where a transport's streams come from (TransportRegistry::make_stream() and open_stream()). Thread-safe.
class Streams {
 public:
  struct Ends {
    StreamEnd producer;
    StreamEnd consumer;
  };
  virtual ~Streams() = default;
  // Throws Error(kResourceExhausted).
  virtual Ends make() const = 0;
  // Opens an end that came from `owner`. Throws Error(kInvalidArgument) if it is none.
  virtual std::unique_ptr<ByteStream> open(StreamEnd end, std::string_view owner) const = 0;
};

}  // namespace tessera
