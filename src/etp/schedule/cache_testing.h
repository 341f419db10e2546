// Memory and keys for the tests of BufferCache.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <new>
#include <vector>

#include "etp/schedule/cache.h"

namespace tessera::etp {

// Memory that remembers what is allocated.
class Arena {
 public:
  BufferMemory memory() {
    return {.allocate =
                [this](int64_t bytes) {
                  auto* memory = static_cast<std::byte*>(
                      ::operator new(static_cast<size_t>(bytes), std::align_val_t(kBufferAlignment)));
                  live_.emplace(memory, bytes);
                  return memory;
                },
            .free =
                [this](std::byte* memory, int64_t bytes, const LastReader& last) {
                  EXPECT_EQ(live_.at(memory), bytes);
                  live_.erase(memory);
                  freed_after.push_back(last);
                  freed.push_back(memory);
                  ::operator delete(memory, std::align_val_t(kBufferAlignment));
                }};
  }
  int64_t bytes() const {
    int64_t sum = 0;
    for (const auto& [memory, size] : live_) sum += size;
    return sum;
  }
  bool owns(const std::byte* memory) const { return live_.contains(memory); }
  size_t buffers() const { return live_.size(); }

  std::vector<LastReader> freed_after;
  std::vector<std::byte*> freed;

 private:
  std::map<const std::byte*, int64_t> live_;
};

inline BufferKey key_of(int64_t rows, Chain chain = Chain::kUngraphed) {
  return {.rows = rows, .columns = 8, .format = WeightFormat(DType::kF32), .chain = chain};
}

}  // namespace tessera::etp
