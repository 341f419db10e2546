#include "device/device.h"

#include "base/fail.h"
#include "device/cpu_device.h"
#include "device/optional.h"

namespace tessera::device {

std::shared_ptr<Device> make_device(DeviceKind kind, const DeviceOptions& options) {
  if (kind == DeviceKind::kCuda) return cuda::make_device(options);
  return std::make_shared<CpuDevice>(options);
}

void Device::wait_host(const Condition& condition, const Deadline& deadline) {
  block_on(condition, deadline);
  if (!recorder_.on()) return;
  thread_local WaitNotes notes;
  notes.clear();
  condition.note(notes);
  recorder_.word_wait(0, 0, notes.edges, notes.text);
}

void Device::wait_host(const Event& given, const Deadline& deadline) {
  if (given.source() == nullptr) return;
  const Event event = given.now();
  if (event.source() == nullptr) return;
  const TimePoint begin = Clock::steady().now();
  if (!event.done() && !block_on(event, deadline))
    fail(ErrorCode::kDeadlineExceeded, "waited {:.3g} s for {}, which has not come so far"_message,
         to_seconds(Clock::steady().now() - begin), event.source()->to_string());
  if (event.number() != 0) recorder_.event_wait(0, event.number());
  event.status().throw_if_error();
}

}  // namespace tessera::device
