// Named places in the code at which tests kill the process or look at it. Each costs one relaxed load if no hook is
// set.
#pragma once

#include <atomic>
#include <string_view>

namespace tessera {

using FailPointHook = void (*)(std::string_view place);

inline std::atomic<FailPointHook>& fail_point_hook() {
  static std::atomic<FailPointHook> hook{nullptr};
  return hook;
}

inline void fail_point(std::string_view place) {
  if (const FailPointHook hook = fail_point_hook().load(std::memory_order_relaxed)) hook(place);
}

}  // namespace tessera
