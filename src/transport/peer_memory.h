// All that this process reaches of one peer's memory: each region by the transport that its key names.
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
  // Connects once the first key has come that needs it. `registry` must outlive this.
  PeerMemory(const TransportRegistry& registry, Endpoint peer, Endpoint self);

  const std::string& name() const override { return peer_.name; }
  Caps caps() const override;                   // of all its transports together
  Status get_refused() const override;          // by the first of them that does
  PathCost cost(Access access) const override;  // the dearest
  // Throws Error(kInvalidArgument) likewise for a transport that there is not, or that does not go from there to here,
  // and what Transport::connect() throws.
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

// --- this process' own memory --------------------------------------------------------------------

// The keys of a connection to oneself.
inline constexpr uint32_t kOwnMemory = 0;  // an offset is an address
inline constexpr uint32_t kOwnPacked = 1;  // LocalMemory::packed; only if `packed` asks for it
std::unique_ptr<Connection> connect_to_self(const Endpoint& self, bool packed = false);

inline RemoteRange own_range(const void* data, size_t bytes) {
  return {.key = kOwnMemory, .offset = reinterpret_cast<uintptr_t>(data), .bytes = bytes};
}
// REQUIRES: own_range() made it
inline const std::byte* own_data(const RemoteRange& range) {
  return reinterpret_cast<const std::byte*>(range.offset);
}

}  // namespace tessera
