// A byte stream over a pair of sockets. The producer sends frames, each preceded by its epoch and size (u32 each); the
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
  // Faults of this side. Bytes are counted over all frames that the producer sends, including headers.
  struct Disturbance {
    uint64_t seed = 1;                       // for delays, and for how much the system takes or gives at a time
    std::optional<uint64_t> spoiled_byte{};  // arrives altered
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

  UniqueFd socket_, bell_;  // the bell wakes a wait for an interrupt
  const Disturbance disturbance_;
  std::minstd_rand random_;
  uint32_t epoch_ = 0;
  uint32_t begun_ = 0;                              // the consumer's epoch, as far as the producer knows
  std::array<std::byte, sizeof(uint32_t)> said_{};  // by the consumer: the epoch that it begins
  size_t said_bytes_ = 0;
  std::vector<std::byte> frame_;                          // header and payload
  size_t moved_ = 0;                                      // bytes of it that were sent or received
  size_t bytes_ = 0;                                      // size of the frame that the consumer holds
  uint64_t sent_ = 0;                                     // in total
  Deadline deadline_ = Deadline::after(Duration::max());  // from the last reserve()
  mutable Mutex mutex_;
  bool interrupted_ GUARDED_BY(mutex_) = false;
  Status status_ GUARDED_BY(mutex_);
};

}  // namespace tessera
