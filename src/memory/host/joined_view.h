// Parts of shared memory, which may be those of several processes, behind each other at one address, to be read. No
// byte is copied: the view shows what the parts hold at any time, until it is detached.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <span>

namespace tessera {

// Thread-safe, except that one thread at a time calls detach().
class JoinedView {
 public:
  struct Part {
    const std::byte* data = nullptr;  // in memory that is mapped as shared: an arena's, or a MappedArena's
    size_t bytes = 0;
  };
  // A view of the parts; it needs their memory, but none of their mappings, to live on. Null where there can be none: a
  // part does not begin at a page, one but the last ends within a page, the memory is private, or the process has no
  // addresses left, or no mappings: all views take at most a quarter of what it can have (vm.max_map_count).
  static std::unique_ptr<JoinedView> of(std::span<const Part> parts);
  ~JoinedView();
  JoinedView(const JoinedView&) = delete;
  JoinedView& operator=(const JoinedView&) = delete;

  const std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  // Gives it memory of its own, at the same address and with what the parts hold now. Other threads may read it
  // meanwhile, and see the same bytes. REQUIRES: nobody writes the parts before it returns. Throws
  // Error(kResourceExhausted), and then is what it was.
  void detach();
  bool detached() const { return detached_.load(std::memory_order_relaxed); }

 private:
  JoinedView(std::byte* data, size_t bytes, size_t length, int mappings);

  std::byte* const data_;
  const size_t bytes_;
  const size_t length_;  // whole pages
  int mappings_;
  std::atomic<bool> detached_{false};
};

}  // namespace tessera
