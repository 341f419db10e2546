#include "device/host_buffer.h"

#include <cstring>
#include <new>
#include <utility>

#include "base/fail.h"
#include "base/log.h"
#include "tessera/memory.h"

namespace tessera::device {
namespace {

constexpr size_t kMinAlignment = 64;
constexpr std::align_val_t kAlignment{kMinAlignment};
constexpr int kPoison = 0xff;

// A block of the process or of the shared heap, and its part of the device's account.
class HostMemory final : public Buffer::Memory {
 public:
  HostMemory(BufferKind kind, size_t bytes, bool poison, std::shared_ptr<std::atomic<size_t>> allocated)
      : bytes_(bytes), poison_(poison), allocated_(std::move(allocated)) {
    if (kind == BufferKind::kShared)
      shared_ = SharedHeap::process().allocate(bytes, bytes < kSharedPage ? kMinAlignment : kSharedPage);
    else
      private_ = static_cast<std::byte*>(::operator new(bytes, kAlignment));
    allocated_->fetch_add(bytes_, std::memory_order_relaxed);
  }
  ~HostMemory() override {
    if (poison_) std::memset(data(), kPoison, bytes_);
    allocated_->fetch_sub(bytes_, std::memory_order_relaxed);
    ::operator delete(private_, kAlignment);
  }
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  std::byte* data() const { return private_ != nullptr ? private_ : shared_.data(); }

 private:
  const size_t bytes_;
  const bool poison_;
  const std::shared_ptr<std::atomic<size_t>> allocated_;
  std::byte* private_ = nullptr;
  SharedBuffer shared_;
};

}  // namespace

Buffer HostBuffers::allocate(BufferKind kind, size_t bytes, std::string_view owner) const {
  if (bytes == 0) return {};
  log_event(LogLevel::debug, "buffer.allocated", {{"bytes", bytes}}, "device: {} bytes of {} memory for {}", bytes,
            kind == BufferKind::kShared ? "shared" : "private", owner);
  try {
    auto memory = std::make_unique<HostMemory>(kind, bytes, poison_, allocated_);
    std::byte* const data = memory->data();
    return {data, bytes, kind, std::move(memory)};
  } catch (const Error& error) {  // of the shared heap
    throw Error(error.code(), fmt::format("{}: {}", owner, error.what()));
  } catch (const std::bad_alloc&) {
    fail(ErrorCode::kResourceExhausted, "{}: {} bytes of memory cannot be had"_message, owner, bytes);
  }
}

}  // namespace tessera::device
