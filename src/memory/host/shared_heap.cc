#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <iterator>
#include <map>
#include <utility>

#include "base/fail.h"
#include "base/mutex.h"
#include "memory/host/shared_arena.h"
#include "tessera/memory.h"

namespace tessera {
namespace {

constexpr size_t kMaxAlignment = 4096;
constexpr size_t kMaxWished = size_t{512} << 20;

}  // namespace

// Arenas live as long as a buffer or a Location in them; the heap itself only keeps one small arena, so that a program
// that allocates and releases single blocks does not create an arena each time.
struct SharedHeap::Impl {
  void forget_gone() REQUIRES(mutex) {
    std::erase_if(arenas, [](const auto& entry) { return entry.second.expired(); });
  }

  size_t mapped() const REQUIRES(mutex) {
    size_t bytes = 0;
    for (const auto& [data, weak] : arenas)
      if (const auto arena = weak.lock()) bytes += arena->bytes();
    return bytes;
  }

  std::shared_ptr<SharedArena> add(size_t bytes) REQUIRES(mutex) {
    forget_gone();
    auto arena = std::make_shared<SharedArena>(next_id++, bytes);
    arenas[arena->data()] = arena;
    if (spare == nullptr && arena->bytes() == SharedArena::kMinBytes) spare = arena;
    return arena;
  }

  // Arenas grow with the heap, so that a large model does not need hundreds of descriptors. If memory is short, an
  // arena of the needed size will do.
  std::shared_ptr<SharedArena> add_for(size_t bytes) REQUIRES(mutex) {
    const size_t needed = std::max(bytes, SharedArena::kMinBytes);
    const size_t wished = std::max(needed, std::min(mapped() / 4, kMaxWished));
    if (wished > needed) {
      try {
        return add(wished);
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kResourceExhausted) throw;
      }
    }
    return add(needed);
  }

  mutable Mutex mutex;
  std::map<const std::byte*, std::weak_ptr<SharedArena>> arenas GUARDED_BY(mutex);  // by address
  std::shared_ptr<SharedArena> spare GUARDED_BY(mutex);
  uint32_t next_id GUARDED_BY(mutex) = 1;
  const pid_t owner = ::getpid();
};

SharedHeap::SharedHeap() : impl_(std::make_unique<Impl>()) {}
SharedHeap::~SharedHeap() = default;

SharedHeap& SharedHeap::process() {
  static auto* heap = new SharedHeap;  // never destroyed: buffers may outlive any order of static destruction
  return *heap;
}

SharedBuffer SharedHeap::allocate(size_t bytes, size_t alignment) {
  if (!std::has_single_bit(alignment) || alignment > kMaxAlignment)
    fail(ErrorCode::kInvalidArgument, "shared memory: alignment {} is not a power of two up to {}"_message, alignment,
         kMaxAlignment);
  SharedBuffer buffer;
  if (bytes == 0) return buffer;
  const MutexLock lock(impl_->mutex);
  if (impl_->owner != ::getpid())
    fail(ErrorCode::kInvalidArgument,
         "shared memory: a forked child must not allocate from its parent's heap; use exec or spawn"_message);
  const auto take_from = [&](std::shared_ptr<SharedArena> arena) {
    if (arena == nullptr) return false;
    buffer.data_ = arena->allocate(bytes, alignment);
    if (buffer.data_ == nullptr) return false;
    buffer.arena_ = std::move(arena);
    buffer.size_ = bytes;
    return true;
  };
  for (const auto& [data, arena] : impl_->arenas)
    if (take_from(arena.lock())) return buffer;
  TESSERA_CHECK(take_from(impl_->add_for(bytes)));
  return buffer;
}

std::optional<SharedHeap::Location> SharedHeap::locate(const void* data, size_t bytes) const {
  const MutexLock lock(impl_->mutex);
  auto after = impl_->arenas.upper_bound(static_cast<const std::byte*>(data));
  if (after == impl_->arenas.begin()) return {};
  std::shared_ptr<SharedArena> arena = std::prev(after)->second.lock();
  if (arena == nullptr || !arena->holds(data, bytes)) return {};
  const auto* base = arena->data();
  return Location{std::move(arena), static_cast<uint64_t>(static_cast<const std::byte*>(data) - base)};
}

std::shared_ptr<SharedArena> SharedHeap::adopt(int fd, bool writes, std::string_view owner) {
  const MutexLock lock(impl_->mutex);
  impl_->forget_gone();
  const auto access = writes ? SharedArena::Access::kWrite : SharedArena::Access::kRead;
  UniqueFd own(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!own) fail_errno(fmt::format("shared memory of {}: another descriptor", owner));
  auto arena = std::make_shared<SharedArena>(impl_->next_id++, std::move(own), access, owner);
  impl_->arenas[arena->data()] = arena;
  return arena;
}

SharedBuffer::SharedBuffer(SharedBuffer&& other) noexcept
    : arena_(std::move(other.arena_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

SharedBuffer& SharedBuffer::operator=(SharedBuffer&& other) noexcept {
  if (this == &other) return *this;
  if (data_ != nullptr) arena_->release(data_);
  arena_ = std::move(other.arena_);
  data_ = std::exchange(other.data_, nullptr);
  size_ = std::exchange(other.size_, 0);
  return *this;
}

SharedBuffer::~SharedBuffer() {
  if (data_ != nullptr) arena_->release(data_);
}

}  // namespace tessera
