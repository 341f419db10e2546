#include "device/virtual/virtual_device.h"

#include <fmt/format.h>

#include "device/inline_stream.h"
#include "device/virtual/scheduler.h"
#include "device/virtual/virtual_stream.h"

namespace tessera::device {

VirtualDevice::VirtualDevice(const DeviceOptions& options, VirtualScheduler& scheduler)
    : Device(options.rank),
      scheduler_(scheduler),
      buffers_(options.poison),
      caller_(std::make_shared<InlineStream>(StreamOptions{.name = "caller"}, *this)) {}

std::string VirtualDevice::name() const {
  return fmt::format("virtual rank {}", recorder().rank());
}

std::shared_ptr<Stream> VirtualDevice::make_stream(const StreamOptions& options) {
  if (options.runs_inline)
    return std::make_shared<InlineStream>(StreamOptions{.name = options.name, .runs_inline = true}, *this);
  return std::make_shared<VirtualStream>(options, *this, scheduler_);
}

void VirtualDevice::block_on(const Condition& condition, const Deadline&) {
  scheduler_.perhaps_yield();
  while (!condition.met())
    scheduler_.block({.ready = [&] { return condition.met(); }, .what = [&] { return condition.to_string(); }});
}

bool VirtualDevice::block_on(const Event& event, const Deadline&) {
  scheduler_.block(
      {.ready = [&] { return event.done(); }, .what = [&] { return "an event of " + event.source()->to_string(); }});
  return true;
}

}  // namespace tessera::device
