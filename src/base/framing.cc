#include "base/framing.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <utility>

#include "base/bytes.h"
#include "base/message.h"
#include "base/socket.h"

namespace tessera {
namespace {

constexpr size_t kFirstBytes = 2 << 10;  // of memory, for a peer that says little
constexpr size_t kLeastRoom = 1 << 10;   // for what is read at a time
constexpr size_t kFillBytes = 256 << 10;
constexpr size_t kJoinBytes = 64 << 10;

struct Header {
  uint32_t magic;
  uint16_t version;
  uint16_t type;
  uint32_t stream;
  uint32_t length;
  uint16_t fds;
  uint16_t check;
};
static_assert(sizeof(Header) == kFrameHeaderBytes);

// Whether it is one of the protocol's at all.
void require_head(const Header& header, uint32_t magic, bool streams, bool checked) {
  if (header.magic != magic)
    fail(ErrorCode::kInvalidArgument,
         "a frame begins with {:#010x}, not {:#010x}: the peer speaks something else"_message, header.magic, magic);
  if (!streams && header.stream != 0)
    fail(ErrorCode::kInvalidArgument, "a frame of type {} on stream {}, where there is none but 0"_message, header.type,
         header.stream);
  if (header.check != 0 && !checked)
    fail(ErrorCode::kInvalidArgument, "a frame of type {} has a check, but should have none"_message, header.type);
}

}  // namespace

bool FrameReader::fill(int fd) {
  for (size_t filled = 0; filled < kFillBytes;) {
    if (begin_ == end_) begin_ = end_ = 0;
    if (begin_ > 0 && buffer_.size() - end_ < kLeastRoom) {
      std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
      end_ -= begin_;
      begin_ = 0;
    }
    if (buffer_.size() - end_ < kLeastRoom) buffer_.resize(std::max(2 * buffer_.size(), kFirstBytes));
    std::vector<UniqueFd> fds;
    const auto room = std::span(buffer_).subspan(end_);
    const auto received = receive_some(fd, room, limits_.fds > 0 ? &fds : nullptr);
    std::move(fds.begin(), fds.end(), std::back_inserter(fds_));
    if (!received) return true;
    if (*received == 0) {
      ended_ = true;
      return false;
    }
    end_ += *received;
    filled += *received;
    if (*received < room.size()) return true;  // drained, most likely: epoll tells
  }
  return true;
}

std::optional<Frame> FrameReader::next() {
  Frame frame;
  if (!next(frame)) return std::nullopt;
  return frame;
}

bool FrameReader::next(Frame& frame) {
  const auto unread = std::span(buffer_).subspan(begin_, end_ - begin_);
  if (ended_ && !unread.empty() && unread.size() < kFrameHeaderBytes)
    fail(ErrorCode::kPeerLost, "the stream ended inside a frame's header"_message);
  if (unread.size() < kFrameHeaderBytes) {
    // What has come belongs to this frame, the one before has been taken.
    if (fds_.size() > limits_.fds)
      fail(ErrorCode::kInvalidArgument,
           "{} descriptors came with part of a frame's header, at most {} are allowed"_message, fds_.size(),
           limits_.fds);
    return false;
  }
  Header header;
  std::memcpy(&header, unread.data(), sizeof(header));
  require_head(header, magic_, limits_of_ != nullptr, checked_);
  const FrameLimits limits = limits_of_ ? limits_of_(header.stream) : limits_;
  if (header.length > limits.payload_bytes)
    fail(ErrorCode::kInvalidArgument, "a frame of type {} announces {} bytes, at most {} are allowed"_message,
         header.type, header.length, limits.payload_bytes);
  if (header.fds > limits.fds)
    fail(ErrorCode::kInvalidArgument, "a frame of type {} announces {} descriptors, at most {} are allowed"_message,
         header.type, header.fds, limits.fds);
  if (header.fds > fds_.size())  // they come with the header's first byte
    fail(ErrorCode::kInvalidArgument, "a frame of type {} announces {} descriptors and brings {}"_message, header.type,
         header.fds, fds_.size());
  if (unread.size() - kFrameHeaderBytes < header.length) {
    if (ended_) fail(ErrorCode::kPeerLost, "the stream ended inside a frame of type {}"_message, header.type);
    if (fds_.size() > header.fds)  // nothing is kept that is not asked for, however slowly the rest may come
      fail(ErrorCode::kInvalidArgument, "{} descriptors came that no frame announced"_message,
           fds_.size() - header.fds);
    return false;
  }

  frame.version = header.version;
  frame.type = header.type;
  frame.stream = header.stream;
  frame.check = header.check;
  frame.fds.clear();
  const auto payload = unread.subspan(kFrameHeaderBytes, header.length);
  if (frame.payload.capacity() > kFillBytes) frame.payload = {};  // as below
  frame.payload.assign(payload.begin(), payload.end());
  frame.fds.reserve(header.fds);
  for (uint16_t i = 0; i < header.fds; ++i) {
    frame.fds.push_back(std::move(fds_.front()));
    fds_.pop_front();
  }
  begin_ += kFrameHeaderBytes + header.length;
  if (begin_ == end_) {
    if (!fds_.empty())
      fail(ErrorCode::kInvalidArgument, "{} descriptors came that no frame announced"_message, fds_.size());
    begin_ = end_ = 0;
    if (buffer_.size() > kFillBytes) buffer_ = {};  // a large frame's memory is not kept
  }
  return true;
}

void FrameWriter::push(uint16_t type, std::span<const std::byte> payload, std::vector<UniqueFd> fds, uint32_t stream,
                       uint16_t check) {
  if (fds.size() > kMaxFdsPerMessage)
    fail(ErrorCode::kInvalidArgument, "a frame with {} descriptors, {} at most"_message, fds.size(), kMaxFdsPerMessage);
  if (payload.size() > UINT32_MAX) fail(ErrorCode::kInvalidArgument, "a frame of {} bytes"_message, payload.size());
  const size_t bytes = kFrameHeaderBytes + payload.size();
  if (queued_bytes_ + bytes > max_queued_bytes_) {
    const size_t waiting = queued_bytes_of(stream);
    if (waiting > 0 && waiting + bytes > max_queued_bytes_)
      fail(ErrorCode::kResourceExhausted, "{} bytes wait for a peer that does not read; at most {} may"_message,
           waiting, max_queued_bytes_);
  }
  queue(type, payload, std::move(fds), stream, check);
}

void FrameWriter::push_last(uint16_t type, std::span<const std::byte> payload, uint32_t stream, uint16_t check) {
  queue(type, payload, {}, stream, check);
}

size_t FrameWriter::queued_bytes_of(uint32_t stream) const {
  size_t bytes = 0;
  for (const Outgoing& outgoing : queue_)
    if (outgoing.stream == stream) bytes += outgoing.bytes.size();
  const bool begun = !queue_.empty() && queue_.front().stream == stream;
  return begun ? bytes - sent_ : bytes;
}

void FrameWriter::queue(uint16_t type, std::span<const std::byte> payload, std::vector<UniqueFd> fds, uint32_t stream,
                        uint16_t check) {
  const size_t bytes = kFrameHeaderBytes + payload.size();
  const Header header{.magic = magic_,
                      .version = version_,
                      .type = type,
                      .stream = stream,
                      .length = static_cast<uint32_t>(payload.size()),
                      .fds = static_cast<uint16_t>(fds.size()),
                      .check = check};
  const auto* head = reinterpret_cast<const std::byte*>(&header);
  // Small frames share one system call.
  const bool joins = !queue_.empty() && fds.empty() && queue_.back().stream == stream &&
                     queue_.back().bytes.size() + bytes <= kJoinBytes;
  if (!joins) queue_.push_back({.stream = stream, .bytes = std::exchange(spare_, {}), .fds = std::move(fds)});
  std::vector<std::byte>& out = queue_.back().bytes;
  if (!joins) out.reserve(bytes);
  out.insert(out.end(), head, head + sizeof(header));
  out.insert(out.end(), payload.begin(), payload.end());
  queued_bytes_ += bytes;
}

bool FrameWriter::flush(int fd) {
  while (!queue_.empty()) {
    Outgoing& front = queue_.front();
    std::array<int, kMaxFdsPerMessage> raw;
    const size_t fds = sent_ == 0 ? front.fds.size() : 0;
    for (size_t i = 0; i < fds; ++i) raw[i] = front.fds[i].get();
    const size_t sent = send_some(fd, std::span(front.bytes).subspan(sent_), std::span(raw).first(fds));
    if (sent == 0) return false;
    front.fds.clear();
    sent_ += sent;
    queued_bytes_ -= sent;
    if (sent_ == front.bytes.size()) {
      spare_ = std::move(front.bytes);
      spare_.clear();
      if (spare_.capacity() > kJoinBytes) spare_ = {};
      queue_.erase(queue_.begin());
      sent_ = 0;
    }
  }
  return true;
}

void FrameWriter::flush(int fd, Deadline deadline) {
  while (!flush(fd)) {
    if (!wait_ready(fd, POLLOUT, deadline))
      fail(ErrorCode::kDeadlineExceeded, "{} bytes could not be sent before the deadline"_message, queued_bytes_);
  }
}

Frame wait_frame(int fd, FrameReader& reader, Deadline deadline) {
  bool open = true;
  while (true) {
    if (auto frame = reader.next()) return std::move(*frame);
    if (!open) fail(ErrorCode::kPeerLost, "the peer closed the connection where a frame was awaited"_message);
    if (!wait_ready(fd, POLLIN, deadline))
      fail(ErrorCode::kDeadlineExceeded, "no frame came before the deadline"_message);
    open = reader.fill(fd);
  }
}

}  // namespace tessera
