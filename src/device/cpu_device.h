// The CPU: streams are threads, memory is the process' own or the shared heap's.
#pragma once

#include <atomic>
#include <memory>

#include "device/device.h"

namespace tessera::device {

class CpuDevice : public Device {
 public:
  explicit CpuDevice(const DeviceOptions& options = {});

  std::string name() const override { return "cpu"; }
  bool concurrent() const override { return true; }
  std::shared_ptr<Stream> make_stream(const StreamOptions& options) override;
  std::shared_ptr<Stream> caller() override { return caller_; }
  Buffer allocate(BufferKind kind, size_t bytes, std::string_view owner) final;
  size_t allocated() const final { return allocated_->load(std::memory_order_relaxed); }

 protected:
  void block_on(const Condition& condition, const Deadline& deadline) override;
  bool block_on(const Event& event, const Deadline& deadline) override;

 private:
  const bool poison_;
  const std::shared_ptr<std::atomic<size_t>> allocated_ = std::make_shared<std::atomic<size_t>>(0);
  const std::shared_ptr<Stream> caller_;
};

}  // namespace tessera::device
