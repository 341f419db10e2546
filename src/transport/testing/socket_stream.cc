#include "transport/testing/socket_stream.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/fail.h"

namespace tessera {
namespace {

constexpr int kMaxDelayMs = 2;

}  // namespace

SocketStream::SocketStream(UniqueFd socket, const Disturbance& disturbance)
    : socket_(std::move(socket)),
      bell_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      disturbance_(disturbance),
      random_(static_cast<uint32_t>(disturbance.seed) + 1),
      frame_(sizeof(Header) + kFrameBytes) {
  if (!bell_) fail_errno("socket stream: eventfd");
}

void SocketStream::begin(uint32_t epoch) {
  TESSERA_CHECK(epoch != 0);
  epoch_ = epoch;
  const MutexLock lock(mutex_);
  uint64_t rung = 0;
  (void)!::read(bell_.get(), &rung, sizeof(rung));
  interrupted_ = false;
  status_ = {};
}

// A frame that an aborted transfer has begun to send is completed, so that frames stay whole.
void SocketStream::begin_produce(uint32_t epoch) {
  begin(epoch);
}

void SocketStream::begin_consume(uint32_t epoch) {
  begin(epoch);
  if (bytes_ != 0) release();  // a frame that an aborted transfer has not returned
  if (::send(socket_.get(), &epoch, sizeof(epoch), MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof(epoch)))
    interrupt(failed(ErrorCode::kPeerLost, "socket stream: {}"_message, std::strerror(errno)));
}

// False once interrupted, or at the deadline.
bool SocketStream::wait(short events, const Deadline& deadline) {
  pollfd polled[] = {{.fd = socket_.get(), .events = events, .revents = 0},
                     {.fd = bell_.get(), .events = POLLIN, .revents = 0}};
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline.left()).count();
  const int limit = static_cast<int>(std::clamp<int64_t>(left + 1, 0, 3'600'000));
  if (deadline.left() == Duration::zero()) return false;
  return ::poll(polled, 2, limit) <= 0 || polled[1].revents == 0;  // the caller checks again
}

void SocketStream::dawdle() {
  if (random_() % 16 != 0) return;
  pollfd bell{.fd = bell_.get(), .events = POLLIN, .revents = 0};
  (void)::poll(&bell, 1, static_cast<int>(random_() % (kMaxDelayMs + 1)));
}

size_t SocketStream::portion(size_t bytes) {
  return random_() % 4 == 0 ? 1 + random_() % bytes : bytes;
}

std::span<std::byte> SocketStream::reserve(const Deadline& deadline) {
  deadline_ = deadline;
  if (!status().ok() || !flush(deadline)) return {};
  while (begun_ != epoch_) {
    if (!receive(said_, said_bytes_, deadline)) return {};
    std::memcpy(&begun_, said_.data(), sizeof(begun_));
    said_bytes_ = 0;
  }
  return std::span(frame_).subspan(sizeof(Header));
}

void SocketStream::publish(size_t bytes) {
  const Header header{.epoch = epoch_, .bytes = static_cast<uint32_t>(bytes)};
  std::memcpy(frame_.data(), &header, sizeof(header));
  bytes_ = sizeof(header) + bytes;
  moved_ = 0;
  if (disturbance_.spoiled_byte && *disturbance_.spoiled_byte - sent_ < bytes_)
    frame_[*disturbance_.spoiled_byte - sent_] ^= std::byte{1};
  flush(deadline_);
}

// Sends the rest of a frame, if there is any.
bool SocketStream::flush(const Deadline& deadline) {
  while (moved_ < bytes_) {
    dawdle();
    if (disturbance_.lost_after && sent_ >= *disturbance_.lost_after) ::shutdown(socket_.get(), SHUT_RDWR);
    const ssize_t sent =
        ::send(socket_.get(), frame_.data() + moved_, portion(bytes_ - moved_), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      moved_ += static_cast<size_t>(sent);
      sent_ += static_cast<uint64_t>(sent);
    } else if (errno != EAGAIN && errno != EINTR) {
      interrupt(failed(ErrorCode::kPeerLost, "socket stream: {}"_message, std::strerror(errno)));
      return false;
    } else if (!wait(POLLOUT, deadline)) {
      return false;
    }
  }
  return true;
}

// Fills `into`, which already has `have` bytes.
bool SocketStream::receive(std::span<std::byte> into, size_t& have, const Deadline& deadline) {
  while (have < into.size()) {
    dawdle();
    if (!wait(POLLIN, deadline)) return false;
    const ssize_t got = ::recv(socket_.get(), into.data() + have, portion(into.size() - have), MSG_DONTWAIT);
    if (got > 0) {
      have += static_cast<size_t>(got);
    } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
      interrupt(failed(ErrorCode::kPeerLost, "socket stream: the other end is closed"_message));
      return false;
    }
  }
  return true;
}

std::span<const std::byte> SocketStream::acquire(const Deadline& deadline) {
  while (status().ok()) {
    Header header;
    if (moved_ < sizeof(header) && !receive(std::span(frame_).first(sizeof(header)), moved_, deadline)) return {};
    std::memcpy(&header, frame_.data(), sizeof(header));
    if (header.bytes == 0 || header.bytes > kFrameBytes) {
      interrupt(failed(ErrorCode::kDataLoss, "socket stream: a frame of {} bytes"_message, header.bytes));
      return {};
    }
    const size_t whole = sizeof(header) + header.bytes;
    if (!receive(std::span(frame_).first(whole), moved_, deadline)) return {};
    bytes_ = whole;
    if (header.epoch == epoch_) return std::span(frame_).subspan(sizeof(header), header.bytes);
    release();  // from an aborted transfer
  }
  return {};
}

void SocketStream::release() {
  bytes_ = 0;
  moved_ = 0;
}

void SocketStream::interrupt(const Status& status) {
  const MutexLock lock(mutex_);
  if (std::exchange(interrupted_, true)) return;
  status_ = status;
  constexpr uint64_t kRing = 1;
  (void)!::write(bell_.get(), &kRing, sizeof(kRing));
}

Status SocketStream::status() const {
  const MutexLock lock(mutex_);
  return status_;
}

}  // namespace tessera
