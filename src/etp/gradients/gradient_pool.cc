#include "etp/gradients/gradient_pool.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/fail.h"
#include "base/log.h"

namespace tessera::etp {

GradientPool::Taken GradientPool::mark_taken(uint32_t index) {
  Entry& entry = entries_[index];
  TESSERA_CHECK(!entry.taken);
  entry.taken = entry.used = true;
  ++sizes_[entry.buffer.bytes()].taken;
  return {.entry = index, .data = entry.buffer.data()};
}

bool GradientPool::take_free(size_t bytes, Taken& taken) {
  const MutexLock lock(mutex_);
  std::vector<uint32_t>& free = sizes_[bytes].free;
  if (free.empty()) return false;
  const uint32_t index = free.back();
  free.pop_back();
  taken = mark_taken(index);
  return true;
}

GradientPool::Taken GradientPool::allocate(size_t bytes, std::string_view weight) {
  device::Buffer buffer = device_.allocate(kind_, bytes, fmt::format("gradient of {}", weight));
  const MutexLock lock(mutex_);
  uint32_t index = static_cast<uint32_t>(entries_.size());
  if (vacant_.empty()) {
    entries_.emplace_back();
  } else {
    index = vacant_.back();
    vacant_.pop_back();
  }
  entries_[index] = {.buffer = std::move(buffer)};
  bytes_ += bytes;
  peak_bytes_ = std::max(peak_bytes_, bytes_);
  return mark_taken(index);
}

void GradientPool::release(uint32_t index) noexcept {
  device::Buffer freed;
  const MutexLock lock(mutex_);
  Entry& entry = entries_[index];
  TESSERA_CHECK(entry.taken);
  entry.taken = false;
  Size& size = sizes_[entry.buffer.bytes()];
  --size.taken;
  if (poison_) std::memset(entry.buffer.data(), 0xff, entry.buffer.bytes());
  if (closed_) {
    bytes_ -= entry.buffer.bytes();
    freed = std::exchange(entry.buffer, {});
  } else {
    size.free.push_back(index);
  }
}

size_t GradientPool::size_of(uint32_t entry) const {
  const MutexLock lock(mutex_);
  return entries_[entry].buffer.bytes();
}

int GradientPool::taken(size_t bytes) const {
  const MutexLock lock(mutex_);
  const auto found = sizes_.find(bytes);
  return found == sizes_.end() ? 0 : found->second.taken;
}

void GradientPool::trim() {
  const MutexLock lock(mutex_);
  for (auto& [bytes, size] : sizes_) {
    std::vector<uint32_t> kept;
    for (const uint32_t index : size.free) {
      if (entries_[index].used) {
        kept.push_back(index);
        continue;
      }
      bytes_ -= bytes;
      entries_[index] = {};
      vacant_.push_back(index);
    }
    size.free = std::move(kept);
  }
  for (Entry& entry : entries_) entry.used = entry.taken;
}

void GradientPool::close() {
  const MutexLock lock(mutex_);
  closed_ = true;
  for (auto& [bytes, size] : sizes_) {
    for (const uint32_t index : size.free) entries_[index] = {};
    bytes_ -= size.free.size() * bytes;
    size.free.clear();
  }
}

size_t GradientPool::bytes() const {
  const MutexLock lock(mutex_);
  return bytes_;
}

size_t GradientPool::peak_bytes() const {
  const MutexLock lock(mutex_);
  return peak_bytes_;
}

}  // namespace tessera::etp
