#include "transport/shm/transport.h"

#include <unistd.h>

#include <optional>

#include "base/fail.h"
#include "base/socket.h"
#include "memory/host/shared_arena.h"
#include "tessera/memory.h"
#include "transport/shm/bounce_ring.h"
#include "transport/shm/connection.h"
#include "transport/shm/key_table.h"
#include "transport/shm/ptrace_consent.h"
#include "transport/shm/remote_read.h"

namespace tessera {
namespace {

class BounceRings final : public Streams {
 public:
  Ends make() const override {
    const std::unique_ptr<BounceRing> ring = BounceRing::create();
    Ends ends;
    ends.producer.fds.push_back(duplicate_fd(ring->fd()));
    ends.consumer.fds.push_back(duplicate_fd(ring->fd()));
    return ends;
  }
  std::unique_ptr<ByteStream> open(StreamEnd end, std::string_view owner) const override {
    if (end.fds.size() != 1)
      fail(ErrorCode::kInvalidArgument, "bounce ring of {}: {} descriptors"_message, owner, end.fds.size());
    return BounceRing::open(std::move(end.fds.front()), owner);
  }
};

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

  std::unique_ptr<Connection> connect(const Endpoint& peer) const override {
    if (!peer.process.same_host(Incarnation::self()))
      fail(ErrorCode::kInvalidArgument, "shm to {}: {} runs on another host"_message, peer.name,
           peer.process.to_string());
    if (liveness_of(peer.process) == Liveness::kDead)
      fail(ErrorCode::kPeerLost, "shm to {}: {} is dead"_message, peer.name, peer.process.to_string());
    return std::make_unique<ShmConnection>(peer.process, peer.name);
  }

  Located locate(const LocalMemory& memory) const override {
    if (memory.packed) return {.region = kPackedRegion, .offset = 0, .caps = {Access::kStream}};
    if (const auto found = block_of(memory))
      return {
          .region = kFirstArena + found->arena->id(), .offset = found->offset, .caps = {Access::kMap, Access::kGet}};
    return {.region = kPrivateRegion,
            .offset = reinterpret_cast<uintptr_t>(memory.data),
            .caps = {Access::kGet, Access::kStream}};
  }
  RemoteKey export_region(const LocalMemory& memory) const override {
    if (memory.packed) return KeyTable::key_of_packed_memory();
    const auto found = block_of(memory);
    return found ? KeyTable::key_of(*found->arena) : KeyTable::key_of_private_memory();
  }
  const Streams* streams() const override { return &rings_; }
  std::unique_ptr<Consent> consent() const override { return std::make_unique<PtraceConsent>(); }

 private:
  static constexpr uint64_t kPrivateRegion = 0;
  static constexpr uint64_t kPackedRegion = 1;
  static constexpr uint64_t kFirstArena = 2;  // by its number

  // Shared if one block of the heap holds it.
  static std::optional<SharedHeap::Location> block_of(const LocalMemory& memory) {
    return memory.bytes == 0 ? std::nullopt : SharedHeap::process().locate(memory.data, memory.bytes);
  }

  BounceRings rings_;
};

}  // namespace

const Transport& shm_transport() {
  static const ShmTransport transport{};
  return transport;
}

}  // namespace tessera
