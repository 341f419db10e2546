// A rank of a VirtualWorld as a device.
#pragma once

#include <memory>
#include <string>

#include "device/device.h"
#include "device/host_buffer.h"

namespace tessera::device {

class VirtualScheduler;

class VirtualDevice final : public Device {
 public:
  VirtualDevice(const DeviceOptions& options, VirtualScheduler& scheduler);

  std::string name() const override;
  bool concurrent() const override { return false; }
  std::shared_ptr<Stream> make_stream(const StreamOptions& options) override;
  std::shared_ptr<Stream> caller() override { return caller_; }
  Buffer allocate(BufferKind kind, size_t bytes, std::string_view owner) override {
    return buffers_.allocate(kind, bytes, owner);
  }
  size_t allocated() const override { return buffers_.allocated(); }

 private:
  void block_on(const Condition& condition, const Deadline& deadline) override;
  bool block_on(const Event& event, const Deadline& deadline) override;

  VirtualScheduler& scheduler_;
  const HostBuffers buffers_;
  const std::shared_ptr<Stream> caller_;
};

}  // namespace tessera::device
