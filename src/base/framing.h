// Messages over a stream socket. A frame is a header of 20 bytes, little-endian,
//
//   u32 magic | u16 protocol version | u16 type | u32 stream | u32 payload length | u16 descriptors | u16 check
//
// then the payload. A connection may carry several streams of frames; where there is one, it is 0. What a check covers
// is up to the protocol; one without checks has 0 there. Descriptors travel as SCM_RIGHTS with the header's first byte.
// Reader and writer never block, keep no descriptor of their own to the socket and are thread-compatible: one thread,
// usually an EventLoop's, drives them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"

namespace tessera {

inline constexpr size_t kFrameHeaderBytes = 20;

struct Frame {
  uint16_t version = 0;
  uint16_t type = 0;
  uint32_t stream = 0;
  uint16_t check = 0;
  std::vector<std::byte> payload;
  std::vector<UniqueFd> fds;
};

struct FrameLimits {
  uint32_t payload_bytes = 1 << 20;
  uint16_t fds = 0;  // at most kMaxFdsPerMessage
};

// Takes frames off a stream.
//
//   const bool open = reader.fill(fd);                       // when fd is readable
//   while (auto frame = reader.next()) handle(*frame);
//   if (!open) close the connection;
//
// Anything malformed (magic, length or descriptors beyond the limits, an end inside a frame) throws Error; the caller
// then closes the connection, the reader is of no more use. Memory grows with the bytes received, never with a length
// merely announced; descriptors that no frame announces are not collected.
class FrameReader {
 public:
  // What a stream's frames may have. Called when a frame's header has arrived.
  using LimitsOf = std::function<FrameLimits(uint32_t stream)>;

  // Of frames on stream 0; one on another is malformed.
  FrameReader(uint32_t magic, FrameLimits limits) : magic_(magic), limits_(limits) {}
  // Of frames on any stream. `limits`: the widest of all streams; descriptors are collected where one may have them.
  FrameReader(uint32_t magic, FrameLimits limits, LimitsOf limits_of)
      : magic_(magic), limits_(limits), limits_of_(std::move(limits_of)) {}

  // Receives what is there, at most about 256 KiB so that one connection cannot hold up the others. False once the
  // peer has ended the stream between two frames: next() may still have some.
  bool fill(int fd);
  // Puts the next whole frame, if it has arrived, into `frame`, whose memory it uses; else false.
  bool next(Frame& frame);
  std::optional<Frame> next();
  // For a protocol that needs larger frames after its hello. Applies to frames not yet taken.
  void set_limits(FrameLimits limits) { limits_ = limits; }
  // Frames may have a check, which the caller compares. Without this, a frame that has one is malformed.
  void take_checks() { checked_ = true; }
  size_t memory() const { return buffer_.capacity(); }

 private:
  uint32_t magic_;
  FrameLimits limits_;
  LimitsOf limits_of_;
  bool checked_ = false;
  std::vector<std::byte> buffer_;
  size_t begin_ = 0;  // buffer_[begin_, end) is unread
  size_t end_ = 0;
  bool ended_ = false;
  std::deque<UniqueFd> fds_;
};

// Puts frames on a stream through a bounded queue.
class FrameWriter {
 public:
  // At most `max_queued_bytes` of each stream wait to be sent.
  FrameWriter(uint32_t magic, uint16_t version, size_t max_queued_bytes)
      : magic_(magic), version_(version), max_queued_bytes_(max_queued_bytes) {}

  // The version that frames queued from now on carry.
  void set_version(uint16_t version) { version_ = version; }
  // Queues one frame. Throws kResourceExhausted, queueing nothing, if its stream's bound would be passed, unless
  // nothing of that stream waits: one frame always fits.
  void push(uint16_t type, std::span<const std::byte> payload, std::vector<UniqueFd> fds = {}, uint32_t stream = 0,
            uint16_t check = 0);
  // Queues a frame that ends its stream, whatever waits.
  void push_last(uint16_t type, std::span<const std::byte> payload, uint32_t stream, uint16_t check = 0);
  // Sends what goes without blocking. True once nothing is left; else call again when fd is writable (EPOLLOUT).
  bool flush(int fd);
  // Sends everything, blocking; throws kDeadlineExceeded. For set-up and tests.
  void flush(int fd, Deadline deadline);

  bool empty() const { return queue_.empty(); }
  size_t queued_bytes() const { return queued_bytes_; }

 private:
  struct Outgoing {
    uint32_t stream = 0;
    std::vector<std::byte> bytes;  // whole frames
    std::vector<UniqueFd> fds;
  };
  size_t queued_bytes_of(uint32_t stream) const;
  void queue(uint16_t type, std::span<const std::byte> payload, std::vector<UniqueFd> fds, uint32_t stream,
             uint16_t check);

  uint32_t magic_;
  uint16_t version_;
  size_t max_queued_bytes_;
  std::vector<Outgoing> queue_;   // short: frames are joined
  std::vector<std::byte> spare_;  // memory of the last one sent
  size_t sent_ = 0;               // of queue_.front()
  size_t queued_bytes_ = 0;
};

// Waits for one frame, blocking. Throws kDeadlineExceeded, or kPeerLost at the end of the stream. For set-up and tests.
Frame wait_frame(int fd, FrameReader& reader, Deadline deadline);

}  // namespace tessera
