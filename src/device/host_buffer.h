// Buffers of host memory, for the devices whose memory that is.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <string_view>

#include "device/buffer.h"

namespace tessera::device {

// Makes a device's buffers and counts their bytes. Thread-safe. Buffers may outlive it.
class HostBuffers {
 public:
  // Released buffers are filled with 0xff if `poison`.
  explicit HostBuffers(bool poison) : poison_(poison) {}

  // Device::allocate().
  Buffer allocate(BufferKind kind, size_t bytes, std::string_view owner) const;
  size_t allocated() const { return allocated_->load(std::memory_order_relaxed); }

 private:
  const bool poison_;
  const std::shared_ptr<std::atomic<size_t>> allocated_ = std::make_shared<std::atomic<size_t>>(0);
};

}  // namespace tessera::device
