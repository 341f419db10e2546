#include "transport/shm/transport.h"

#include <unistd.h>

#include "base/fail.h"
#include "transport/shm/peer_memory.h"
#include "transport/shm/remote_read.h"

namespace tessera {
namespace {

class ShmTransport final : public Transport {
 public:
  std::string_view name() const override { return "shm"; }

  Capability capability() const override {
    Capability host = device_capability(DeviceKind::kHost);
    if (!host.available) return host;
    const Status readv = probe_remote_read(::getpid());
    return {.available = true,
            .detail = fmt::format("{}; private memory by {}", host.detail,
                                  readv.ok() ? std::string("process_vm_readv, or a bounce ring where pieces are small")
                                             : fmt::format("bounce ring only ({})", readv.message()))};
  }

  int score(const Endpoint& src, const Endpoint& dst) const override {
    const bool host = src.device == DeviceKind::kHost && dst.device == DeviceKind::kHost;
    return host && src.process.same_host(dst.process) ? 50 : 0;
  }

  std::unique_ptr<PeerMemory> connect(const Endpoint& peer) const override {
    if (!peer.process.same_host(Incarnation::self()))
      fail(ErrorCode::kInvalidArgument, "shm to {}: {} runs on another host", peer.name, peer.process.to_string());
    if (liveness_of(peer.process) == Liveness::kDead)
      fail(ErrorCode::kPeerLost, "shm to {}: {} is dead", peer.name, peer.process.to_string());
    return std::make_unique<ShmPeerMemory>(peer.process, peer.name);
  }
};

}  // namespace

const Transport& shm_transport() {
  static const ShmTransport transport;
  return transport;
}

}  // namespace tessera
