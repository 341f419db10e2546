// Devices that a build may lack: one function for each folder, or for its no_<device>.cc.
#pragma once

#include <memory>

#include "device/device.h"

namespace tessera::device::cuda {

std::shared_ptr<Device> make_device(const DeviceOptions& options);

}  // namespace tessera::device::cuda
