// A byte stream over a pair of sockets. The producer sends frames, each behind its epoch and size (u32 each); the
// consumer sends the epoch (u32) of each transfer that it begins.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <vector>

#include "base/fd.h"
#include "base/mutex.h"
#include "transport/byte_stream.h"

namespace tessera {

class SocketStream final : public ByteStream {
 public:
  // What goes wrong on this side. Bytes are counted over all frames that the producer sends, headers too.
  struct Disturbance {
    uint64_t seed = 1;                       // of delays, and of how much the system takes or gives at once
    std::optional<uint64_t> spoiled_byte{};  // arrives as another
    std::optional<uint64_t> lost_after{};    // then the connection is lost
  };
  SocketStream(UniqueFd socket, const Disturbance& disturbance);
  ~SocketStream() override = default;

  std::string_view name() const override { return "socket stream"; }
  void begin_produce(uint32_t epoch) override;
  void begin_consume(uint32_t epoch) override;
  std::span<std::byte> reserve(const Deadline& deadline) override;
  void publish(size_t bytes) override;
  std::span<const std::byte> acquire(const Deadline& deadline) override;
  void release() override;
  void interrupt(const Status& status) override;
  Status status() const override;

 private:
  struct Header {
    uint32_t epoch = 0;
    uint32_t bytes = 0;
  };

  void begin(uint32_t epoch);
  bool wait(short events, const Deadline& deadline);
  void dawdle();
  bool flush(const Deadline& deadline);
  bool receive(std::span<std::byte> into, size_t& have, const Deadline& deadline);
  size_t portion(size_t bytes);

  UniqueFd socket_, bell_;  // the bell wakes a wait that is interrupted
  const Disturbance disturbance_;
  std::minstd_rand random_;
  uint32_t epoch_ = 0;
  uint32_t begun_ = 0;                              // by the consumer, as far as the producer knows
  std::array<std::byte, sizeof(uint32_t)> said_{};  // by the consumer: the epoch that it begins
  size_t said_bytes_ = 0;
  std::vector<std::byte> frame_;                          // header and payload
  size_t moved_ = 0;                                      // bytes of it that are sent, or have come
  size_t bytes_ = 0;                                      // that it has, of the producer's
  uint64_t sent_ = 0;                                     // in all
  Deadline deadline_ = Deadline::after(Duration::max());  // of the last reserve()
  mutable Mutex mutex_;
  bool interrupted_ GUARDED_BY(mutex_) = false;
  Status status_ GUARDED_BY(mutex_);
};

}  // namespace tessera
