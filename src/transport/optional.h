// Transports that a build may leave out: either the folder of that name or its no_<name>.cc defines each function.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "base/fail.h"
#include "transport/transport.h"

namespace tessera {

const Transport& cuda_ipc_transport();
const Transport& nccl_transport();
const Transport& ucx_transport();

// Returned by a no_<name>.cc: never chosen; its message says how to get the real one.
class AbsentTransport final : public Transport {
 public:
  AbsentTransport(std::string_view name, std::string how) : name_(name), how_(std::move(how)) {}

  std::string_view name() const override { return name_; }
  Capability capability() const override { return {.available = false, .detail = how_}; }
  int score(const Endpoint&, const Endpoint&) const override { return 0; }
  std::unique_ptr<Connection> connect(const Endpoint& peer) const override {
    fail(ErrorCode::kUnimplemented, "{} to {}: {}"_message, name_, peer.name, how_);
  }
  Located locate(const LocalMemory&) const override { return {}; }
  RemoteKey export_region(const LocalMemory&) const override {
    fail(ErrorCode::kUnimplemented, "{}: {}"_message, name_, how_);
  }
  const Streams* streams() const override { return nullptr; }
  std::unique_ptr<Consent> consent() const override { return nullptr; }

 private:
  std::string_view name_;
  std::string how_;
};

}  // namespace tessera
