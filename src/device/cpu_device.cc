#include "device/cpu_device.h"

#include "device/inline_stream.h"
#include "device/thread_stream.h"

namespace tessera::device {

CpuDevice::CpuDevice(const DeviceOptions& options)
    : Device(options.rank),
      buffers_(options.poison),
      caller_(std::make_shared<InlineStream>(StreamOptions{.name = "caller"}, *this)) {}

std::shared_ptr<Stream> CpuDevice::make_stream(const StreamOptions& options) {
  if (options.runs_inline) return std::make_shared<InlineStream>(options, *this);
  const auto stream = std::make_shared<ThreadStream>(options, *this);
  if (options.helped && options.link == nullptr) stream->be_helped();
  return stream;
}

void CpuDevice::block_on(const Condition& condition, const Deadline& deadline) {
  await(condition, deadline);
}

bool CpuDevice::block_on(const Event& event, const Deadline& deadline) {
  event.help();
  return event.wait(deadline);
}

}  // namespace tessera::device
