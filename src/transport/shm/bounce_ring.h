// A bounce ring: a byte stream through shared memory. One producer, one consumer, across processes.
//
// Layout of the memfd: a header of one page (indices on separate cache lines), then kSlots slots. The stream is cut
// into frames of at most kSlotBytes, one in each slot. Both sides keep their own counters: what the other wrote is
// copied once and checked against them, so that a hostile peer can corrupt the data or stall, but cannot make us fault
// or overrun a buffer. The creator seals the file against resizing; the opener refuses a file without the seals.
//
// A side that has to wait sleeps on a futex and is woken by a system call only if it has announced that it sleeps.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "base/clock.h"
#include "base/fd.h"
#include "base/mutex.h"
#include "tessera/error.h"
#include "transport/byte_stream.h"

namespace tessera {

class BounceRing final : public ByteStream {
 public:
  static constexpr uint32_t kSlots = 8;
  static constexpr size_t kSlotBytes = kFrameBytes;

  // Creates a ring; fd() is for the other side. Throws Error(kResourceExhausted).
  static std::unique_ptr<BounceRing> create();
  // Opens a ring that `owner` created. Throws Error(kInvalidArgument) if seals or size are wrong.
  static std::unique_ptr<BounceRing> open(UniqueFd fd, std::string_view owner);
  ~BounceRing() override;

  int fd() const { return fd_.get(); }

  std::string_view name() const override { return "bounce ring"; }
  void begin_produce(uint32_t epoch) override;
  void begin_consume(uint32_t epoch) override;
  std::span<std::byte> reserve(const Deadline& deadline) override;  // a free slot
  void publish(size_t bytes) override;
  std::span<const std::byte> acquire(const Deadline& deadline) override;
  void release() override;
  void interrupt(const Status& status) override;
  Status status() const override;

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
  std::byte* data_;  // header and slots, mapped
  uint32_t epoch_ = 0;
  uint32_t count_ = 0;  // frames that this side has published or released in this stream
  std::atomic<bool> interrupted_{false};
  mutable Mutex mutex_;
  Side* own_ GUARDED_BY(mutex_) = nullptr;  // since the transfer began
  Status status_ GUARDED_BY(mutex_);
};

}  // namespace tessera
