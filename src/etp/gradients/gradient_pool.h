// Buffers of gradients [F, K]: of GradientBuffers that a user holds, and of rounds that owners read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string_view>
#include <vector>

#include "base/mutex.h"
#include "device/device.h"

namespace tessera::etp {

// Thread-safe: a GradientBuffer may be dropped on any thread, also after the runtime. Buffers of one size replace each
// other. It takes back only what it gave, and only once.
class GradientPool {
 public:
  struct Taken {
    uint32_t entry = 0;
    std::byte* data = nullptr;
  };

  // `keeper` keeps the device.
  GradientPool(std::shared_ptr<const void> keeper, device::Device& device, device::BufferKind kind, bool poison)
      : keeper_(std::move(keeper)), device_(device), kind_(kind), poison_(poison) {}

  // A free buffer of that size, if there is one.
  bool take_free(size_t bytes, Taken& taken);
  // A new one. Throws Error(kResourceExhausted).
  Taken allocate(size_t bytes, std::string_view weight);
  void release(uint32_t entry) noexcept;
  size_t size_of(uint32_t entry) const;
  // Buffers of that size that are taken.
  int taken(size_t bytes) const;
  // Frees what has not been taken since the last call.
  void trim();
  // No buffer is made any longer; those that return are freed.
  void close();

  size_t bytes() const;
  size_t peak_bytes() const;

 private:
  struct Entry {
    device::Buffer buffer;
    bool taken = false;
    bool used = false;  // since the last trim()
  };
  struct Size {
    std::vector<uint32_t> free;
    int taken = 0;
  };
  Taken mark_taken(uint32_t entry) REQUIRES(mutex_);

  const std::shared_ptr<const void> keeper_;
  device::Device& device_;
  const device::BufferKind kind_;
  const bool poison_;
  mutable Mutex mutex_;
  bool closed_ GUARDED_BY(mutex_) = false;
  std::vector<Entry> entries_ GUARDED_BY(mutex_);
  std::vector<uint32_t> vacant_ GUARDED_BY(mutex_);  // entries without a buffer
  std::map<size_t, Size> sizes_ GUARDED_BY(mutex_);
  size_t bytes_ GUARDED_BY(mutex_) = 0;
  size_t peak_bytes_ GUARDED_BY(mutex_) = 0;
};

}  // namespace tessera::etp
