#include "device/virtual/virtual_world.h"

#include "device/virtual/scheduler.h"
#include "device/virtual/virtual_device.h"

namespace tessera::device {

VirtualWorld::VirtualWorld(uint64_t seed, Order order, bool poison)
    : scheduler_(std::make_unique<VirtualScheduler>(seed, order)), poison_(poison) {}

VirtualWorld::~VirtualWorld() = default;

Device& VirtualWorld::device(int rank) {
  std::unique_ptr<Device>& device = devices_[rank];
  if (device == nullptr)
    device = std::make_unique<VirtualDevice>(DeviceOptions{.rank = rank, .poison = poison_}, *scheduler_);
  return *device;
}

void VirtualWorld::run(int ranks, const std::function<void(int rank)>& host) {
  scheduler_->run(ranks, host);
}

uint64_t VirtualWorld::steps() const {
  return scheduler_->steps();
}

}  // namespace tessera::device
