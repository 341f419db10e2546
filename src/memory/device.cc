#include "memory/device.h"

namespace tessera {

std::string_view to_string(DeviceKind kind) {
  return kind == DeviceKind::kHost ? "host" : "cuda";
}

Capability device_capability(DeviceKind kind) {
  return kind == DeviceKind::kHost ? host::capability() : cuda::capability();
}

}  // namespace tessera
