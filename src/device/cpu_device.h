// The CPU: streams are threads, memory is the process' own or the shared heap's.
#pragma once

#include <memory>
#include <string>

#include "device/device.h"
#include "device/host_buffer.h"

namespace tessera::device {

class CpuDevice final : public Device {
 public:
  explicit CpuDevice(const DeviceOptions& options = {});

  std::string name() const override { return "cpu"; }
  bool concurrent() const override { return true; }
  std::shared_ptr<Stream> make_stream(const StreamOptions& options) override;
  std::shared_ptr<Stream> caller() override { return caller_; }
  Buffer allocate(BufferKind kind, size_t bytes, std::string_view owner) override {
    return buffers_.allocate(kind, bytes, owner);
  }
  size_t allocated() const override { return buffers_.allocated(); }

 private:
  void block_on(const Condition& condition, const Deadline& deadline) override;
  bool block_on(const Event& event, const Deadline& deadline) override;

  const HostBuffers buffers_;
  const std::shared_ptr<Stream> caller_;
};

}  // namespace tessera::device
