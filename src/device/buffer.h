// Memory of a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

namespace tessera::device {

enum class BufferKind : uint8_t {
  kPrivate,
  kShared,  // peers can map it: tessera/memory.h
};
inline constexpr size_t kSharedPage = 4096;  // shared blocks of that many bytes and more begin at a multiple of it

// A block that begins at a multiple of 64 bytes. Move-only. Destroy it only once no operation uses it.
class Buffer {
 public:
  // What holds a block and releases it.
  class Memory {
   public:
    virtual ~Memory() = default;
  };

  Buffer() = default;
  Buffer(std::byte* data, size_t bytes, BufferKind kind, std::unique_ptr<Memory> memory)
      : data_(data), bytes_(bytes), kind_(kind), memory_(std::move(memory)) {}
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer(std::move(other)).swap(*this);
    return *this;
  }

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  BufferKind kind() const { return kind_; }
  std::span<std::byte> span() const { return {data_, bytes_}; }
  explicit operator bool() const { return memory_ != nullptr; }

 private:
  void swap(Buffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(kind_, other.kind_);
    std::swap(memory_, other.memory_);
  }

  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  BufferKind kind_ = BufferKind::kPrivate;
  std::unique_ptr<Memory> memory_;
};

}  // namespace tessera::device
