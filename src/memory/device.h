// The kinds of memory that tensors can be in, and what this build and machine can do with each.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera {

// Whether a part of Tessera can be used on this machine, in words for `tessera doctor`.
struct Capability {
  bool available = false;
  std::string detail;  // what it does, or what is missing and how to get it
};

enum class DeviceKind : uint8_t { kHost, kCuda };
std::string_view to_string(DeviceKind kind);  // "host", "cuda"

// Thread-safe.
Capability device_capability(DeviceKind kind);

// One for each folder (or its no_<device>.cc).
namespace host {
Capability capability();
}
namespace cuda {
Capability capability();
}

}  // namespace tessera
