#include "transport/loopback/transport.h"

#include "base/fail.h"
#include "transport/loopback/connection.h"

namespace tessera {
namespace {

class LoopbackTransport final : public Transport {
 public:
  std::string_view name() const override { return "loopback"; }
  Capability capability() const override { return {.available = true, .detail = "copies within a process"}; }
  int score(const Endpoint& src, const Endpoint& dst) const override {
    const bool host = src.device == DeviceKind::kHost && dst.device == DeviceKind::kHost;
    return host && src.process.same_process(dst.process) ? 100 : 0;
  }
  std::unique_ptr<Connection> connect(const Endpoint& peer) const override {
    if (!peer.process.same_process(Incarnation::self()))
      fail(ErrorCode::kInvalidArgument, "loopback to {}: {} is another process"_message, peer.name,
           peer.process.to_string());
    return std::make_unique<LoopbackConnection>(peer.name);
  }
  Located locate(const LocalMemory& memory) const override {
    TESSERA_CHECK(!memory.packed);
    return {.region = 0, .offset = reinterpret_cast<uintptr_t>(memory.data), .caps = {Access::kMap, Access::kGet}};
  }
  RemoteKey export_region(const LocalMemory& memory) const override {
    TESSERA_CHECK(!memory.packed);
    return {.transport = std::string(name()), .device = memory.device, .bytes = {}, .fds = {}};
  }
  const Streams* streams() const override { return nullptr; }
  std::unique_ptr<Consent> consent() const override { return nullptr; }
};

}  // namespace

const Transport& loopback_transport() {
  static const LoopbackTransport transport;
  return transport;
}

}  // namespace tessera
