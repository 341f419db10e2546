// Where operations run and their memory lies. The seam between the scheduler of ETP and a CPU, a GPU or a simulation.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "device/buffer.h"
#include "device/condition.h"
#include "device/event.h"
#include "device/record/recorder.h"
#include "device/stream.h"
#include "memory/device.h"

namespace tessera::device {

// Thread-safe. It outlives its streams and its buffers.
class Device {
 public:
  virtual ~Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // "cpu", "virtual rank 2".
  virtual std::string name() const = 0;
  // Whether streams run beside the host. False: only while a host waits.
  virtual bool concurrent() const = 0;

  virtual std::shared_ptr<Stream> make_stream(const StreamOptions& options) = 0;
  // The stream that the host program computes on: what is enqueued has happened in the eyes of the host's next
  // computation. Inline on a CPU.
  virtual std::shared_ptr<Stream> caller() = 0;

  // `owner` is for the log: "gathered wte.weight". Contents are undefined (kPrivate) or zero (kShared). Throws
  // Error(kResourceExhausted).
  virtual Buffer allocate(BufferKind kind, size_t bytes, std::string_view owner) = 0;
  // Bytes of the buffers that live.
  virtual size_t allocated() const = 0;

  // Blocks the host. Every wait of a host program goes through these, so that a simulated one lets others run. Throw
  // Error(kDeadlineExceeded) that says what was waited for, what the condition throws, or the poison of the event's
  // stream. The recorder notes what they order.
  void wait_host(const Condition& condition, const Deadline& deadline);
  void wait_host(const Event& event, const Deadline& deadline);
  // Likewise for an operation of the host, which has it recorded.
  void wait_for(const Condition& condition, const Deadline& deadline) { block_on(condition, deadline); }

  Recorder& recorder() { return recorder_; }
  const Recorder& recorder() const { return recorder_; }

 protected:
  explicit Device(int rank) : recorder_(rank) {}

  virtual void block_on(const Condition& condition, const Deadline& deadline) = 0;
  // Whether it was done by the deadline.
  virtual bool block_on(const Event& event, const Deadline& deadline) = 0;

 private:
  Recorder recorder_;
};

struct DeviceOptions {
  int rank = 0;         // of the recorder
  bool poison = false;  // released buffers are filled with 0xff, a NaN of every float format
};

// The device of this process, of a kind. Throws Error(kUnimplemented) if this build has none; the message says how to
// get it.
std::shared_ptr<Device> make_device(DeviceKind kind, const DeviceOptions& options = {});

}  // namespace tessera::device
