// A bounce ring: shared memory through which a sender hands a stream of bytes to one receiver that may not, or should
// not, read the sender's private memory itself. One producer, one consumer, across processes.
//
// Layout of the memfd: a header of one page (indices on cache lines of their own), then kSlots slots. The stream is cut
// into frames of at most kSlotBytes, one a slot. Both sides keep their own counters: what the other wrote is copied
// once and checked against them, so that a hostile peer can spoil the data or stall, but neither fault nor overrun us.
// The file is sealed against resizing by whoever creates it, and refused otherwise by whoever opens it.
//
// A side that has to wait sleeps on a futex and is woken by a system call only when it said that it sleeps.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>

#include "base/clock.h"
#include "base/fd.h"
#include "tessera/error.h"

namespace tessera {

// One side's hold on a ring. A side is used by one thread at a time; interrupt() may be called from any thread.
class BounceRing {
 public:
  static constexpr uint32_t kSlots = 8;
  static constexpr size_t kSlotBytes = size_t{128} << 10;

  // Creates a ring; fd() is for the other side. Throws Error(kResourceExhausted).
  static std::unique_ptr<BounceRing> create();
  // Opens one that `owner` created. Throws Error(kInvalidArgument) if seals or size are wrong.
  static std::unique_ptr<BounceRing> open(UniqueFd fd, std::string_view owner);
  ~BounceRing();
  BounceRing(const BounceRing&) = delete;
  BounceRing& operator=(const BounceRing&) = delete;

  int fd() const { return fd_.get(); }

  // Each side begins every stream with a number above 0 that both know and that differs from the last one's: frames of
  // an aborted stream are then told apart. Forgets interrupt().
  void begin_produce(uint32_t epoch);
  void begin_consume(uint32_t epoch);

  // Producer: a free slot of kSlotBytes, once the consumer has begun this stream too. Empty if interrupted or at the
  // deadline: status() says which.
  std::span<std::byte> reserve(const Deadline& deadline);
  void publish(size_t bytes);  // hands over the first `bytes` of the slot last reserved

  // Consumer: the next frame. Empty if interrupted, at the deadline, or if the producer wrote nonsense: see status().
  std::span<const std::byte> acquire(const Deadline& deadline);
  void release();  // gives back the slot last acquired

  // Ends this side's wait, under way or to come, with `status` (the first one stays until the next stream begins).
  // Thread-safe.
  void interrupt(const Status& status);
  Status status() const;

 private:
  struct Header;
  struct Side;
  BounceRing(UniqueFd fd, std::byte* data);
  Header& header() const;
  std::byte* slot(uint32_t frame) const;
  void begin(Side& own, Side& other, uint32_t epoch);
  static void wake(Side& side);
  template <typename Ready>
  bool wait(Side& own, Ready ready, const Deadline& deadline);

  UniqueFd fd_;
  std::byte* data_;      // header and slots, mapped
  Side* own_ = nullptr;  // since begin
  uint32_t epoch_ = 0;
  uint32_t count_ = 0;  // frames that this side has published or released in this stream
  std::atomic<bool> interrupted_{false};
  mutable std::mutex mutex_;
  Status status_;
};

}  // namespace tessera
