#include "memory/host/joined_view.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <utility>

#include "base/fail.h"
#include "base/rounding.h"

namespace tessera {
namespace {

constexpr int kUsualMappings = 65530;  // Linux's default

size_t page_bytes() {
  static const auto bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

int most_mappings() {
  static const int most = [] {
    int limit = 0;
    std::ifstream file("/proc/sys/vm/max_map_count");
    return (file >> limit && limit > 0 ? limit : kUsualMappings) / 4;
  }();
  return most;
}

std::atomic<int>& mappings_taken() {
  static std::atomic<int> taken{0};
  return taken;
}

bool take_mappings(int count) {
  if (mappings_taken().fetch_add(count, std::memory_order_relaxed) + count <= most_mappings()) return true;
  mappings_taken().fetch_sub(count, std::memory_order_relaxed);
  return false;
}

void give_mappings(int count) {
  mappings_taken().fetch_sub(count, std::memory_order_relaxed);
}

bool fits_pages(std::span<const JoinedView::Part> parts) {
  for (size_t i = 0; i < parts.size(); ++i)
    if (parts[i].bytes == 0 || reinterpret_cast<uintptr_t>(parts[i].data) % page_bytes() != 0 ||
        (i + 1 < parts.size() && parts[i].bytes % page_bytes() != 0))
      return false;
  return !parts.empty();
}

[[noreturn]] void fail_copy(size_t bytes, int error) {
  fail(ErrorCode::kResourceExhausted, "{} bytes of memory cannot be had for a copy of what is still in use: {}"_message,
       bytes, std::strerror(error));
}

std::byte* reserve_addresses(size_t length) {
  void* const data = ::mmap(nullptr, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return data == MAP_FAILED ? nullptr : static_cast<std::byte*>(data);
}

// The same pages at a second address. An old length of 0 asks for that, of shared mappings only.
bool map_again(const JoinedView::Part& part, std::byte* to) {
  return ::mremap(const_cast<std::byte*>(part.data), 0, round_up(part.bytes, page_bytes()),
                  MREMAP_MAYMOVE | MREMAP_FIXED, to) != MAP_FAILED;
}

}  // namespace

JoinedView::JoinedView(std::byte* data, size_t bytes, size_t length, int mappings)
    : data_(data), bytes_(bytes), length_(length), mappings_(mappings) {}

std::unique_ptr<JoinedView> JoinedView::of(std::span<const Part> parts) {
  if (!fits_pages(parts) || !take_mappings(static_cast<int>(parts.size()))) return nullptr;
  size_t bytes = 0;
  for (const Part& part : parts) bytes += part.bytes;
  const size_t length = round_up(bytes, page_bytes());
  std::byte* const data = reserve_addresses(length);
  if (data == nullptr) {
    give_mappings(static_cast<int>(parts.size()));
    return nullptr;
  }
  std::unique_ptr<JoinedView> view(new JoinedView(data, bytes, length, static_cast<int>(parts.size())));
  std::byte* next = data;
  for (const Part& part : parts) {
    if (!map_again(part, next)) return nullptr;
    next += part.bytes;
  }
  if (::mprotect(data, length, PROT_READ) != 0) return nullptr;  // this process may write its own part elsewhere
#ifdef MADV_POPULATE_READ
  ::madvise(data, length, MADV_POPULATE_READ);
#endif
  return view;
}

JoinedView::~JoinedView() {
  ::munmap(data_, length_);
  give_mappings(mappings_);
}

void JoinedView::detach() {
  if (detached()) return;
  void* const own = ::mmap(nullptr, length_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (own == MAP_FAILED) fail_copy(bytes_, errno);
  std::memcpy(own, data_, bytes_);
  ::mprotect(own, length_, PROT_READ);
  // In one step for other threads: one that reads in between waits for it in the kernel.
  if (::mremap(own, length_, length_, MREMAP_MAYMOVE | MREMAP_FIXED, data_) == MAP_FAILED) {
    const int error = errno;
    ::munmap(own, length_);
    fail_copy(bytes_, error);
  }
  give_mappings(std::exchange(mappings_, 1) - 1);
  detached_ = true;
}

}  // namespace tessera
