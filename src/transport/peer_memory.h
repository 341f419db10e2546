// All memory of one peer that this process can access: each region by the transport that its key names.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "transport/connection.h"
#include "transport/transport.h"

namespace tessera {

class PeerMemory final : public Connection {
 public:
  // Connects when the first key arrives that needs it. `registry` must outlive this.
  PeerMemory(const TransportRegistry& registry, Endpoint peer, Endpoint self);

  const std::string& name() const override { return peer_.name; }
  Caps caps() const override;                   // of all transports together
  Status get_refused() const override;          // from the first of them that refuses
  PathCost cost(Access access) const override;  // the highest
  // Throws Error(kInvalidArgument) also for a transport that does not exist or does not work in this direction, and the
  // errors of Transport::connect().
  void add_key(uint32_t index, RemoteKey key) override;
  RemoteRegion region(const RemoteRange& range) const override;
  Status get(uint32_t key, std::span<const Piece> pieces, std::span<const std::span<std::byte>> out) const override;

 private:
  struct Reached {
    const Transport* transport;
    DeviceKind device;
    std::unique_ptr<Connection> connection;
  };
  Connection& reach(uint32_t index, const RemoteKey& key);
  const Connection& owner_of(uint32_t key) const;

  const TransportRegistry& registry_;
  const Endpoint peer_, self_;
  std::vector<Reached> reached_;
  std::map<uint32_t, Connection*> keys_;
};

// --- this process's own memory --------------------------------------------------------------------

// The keys of a connection to this process itself.
inline constexpr uint32_t kOwnMemory = 0;  // an offset is an address
inline constexpr uint32_t kOwnPacked = 1;  // LocalMemory::packed; only if `packed` is requested
std::unique_ptr<Connection> connect_to_self(const Endpoint& self, bool packed = false);

inline RemoteRange own_range(const void* data, size_t bytes) {
  return {.key = kOwnMemory, .offset = reinterpret_cast<uintptr_t>(data), .bytes = bytes};
}
// REQUIRES: own_range() made it
inline const std::byte* own_data(const RemoteRange& range) {
  return reinterpret_cast<const std::byte*>(range.offset);
}

}  // namespace tessera
