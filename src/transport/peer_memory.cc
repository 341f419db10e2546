#include "transport/peer_memory.h"

#include <algorithm>
#include <utility>

#include "base/escape.h"
#include "base/fail.h"

namespace tessera {

PeerMemory::PeerMemory(const TransportRegistry& registry, Endpoint peer, Endpoint self)
    : registry_(registry), peer_(std::move(peer)), self_(std::move(self)) {}

Caps PeerMemory::caps() const {
  Caps caps;
  for (const Reached& reached : reached_) caps = caps.with(reached.connection->caps());
  return caps;
}

Status PeerMemory::get_refused() const {
  for (const Reached& reached : reached_) {
    if (reached.connection->caps().has(Access::kGet)) continue;
    if (Status refused = reached.connection->get_refused(); !refused.ok()) return refused;
  }
  return {};
}

PathCost PeerMemory::cost(Access access) const {
  PathCost cost;
  for (const Reached& reached : reached_) {
    if (!reached.connection->caps().has(access)) continue;
    const PathCost one = reached.connection->cost(access);
    cost = {.byte = std::max(cost.byte, one.byte), .piece = std::max(cost.piece, one.piece)};
  }
  return cost;
}

void PeerMemory::add_key(uint32_t index, RemoteKey key) {
  if (keys_.contains(index))
    fail(ErrorCode::kInvalidArgument, "memory of {}: key {} came twice"_message, name(), index);
  Connection& connection = reach(index, key);
  connection.add_key(index, std::move(key));
  keys_.emplace(index, &connection);
}

Connection& PeerMemory::reach(uint32_t index, const RemoteKey& key) {
  const Transport* const transport = registry_.find(key.transport);
  if (transport == nullptr)
    fail(ErrorCode::kInvalidArgument, "memory of {}: key {} is of transport {}, which is unknown here"_message, name(),
         index, in_quotes(key.transport));
  for (const Reached& reached : reached_)
    if (reached.transport == transport && reached.device == key.device) return *reached.connection;
  Endpoint src = peer_;
  src.device = key.device;
  if (transport->score(src, self_) <= 0)
    fail(ErrorCode::kInvalidArgument,
         "memory of {}: key {} is of {}, which does not go from {} ({} memory) to {}"_message, name(), index,
         transport->name(), src.process.to_string(), to_string(src.device), self_.process.to_string());
  return *reached_.emplace_back(transport, key.device, transport->connect(src)).connection;
}

const Connection& PeerMemory::owner_of(uint32_t key) const {
  const auto found = keys_.find(key);
  if (found == keys_.end())
    fail(ErrorCode::kInvalidArgument, "memory of {}: key {} was never given"_message, name(), key);
  return *found->second;
}

RemoteRegion PeerMemory::region(const RemoteRange& range) const {
  return owner_of(range.key).region(range);
}

Status PeerMemory::get(uint32_t key, std::span<const Piece> pieces, std::span<const std::span<std::byte>> out) const {
  return keys_.find(key)->second->get(key, pieces, out);
}

std::unique_ptr<Connection> connect_to_self(const Endpoint& self, bool packed) {
  const TransportRegistry& registry = TransportRegistry::builtin();
  auto memory = std::make_unique<PeerMemory>(registry, self, self);
  memory->add_key(kOwnMemory, registry.choose(self, self).export_region({}));
  if (packed) memory->add_key(kOwnPacked, registry.streaming(self, self).export_region({.packed = true}));
  return memory;
}

}  // namespace tessera
