// This process' own memory, reached as if it were a peer's.
#pragma once

#include <string>
#include <utility>

#include "transport/arena_table.h"
#include "transport/connection.h"

namespace tessera {

class LoopbackConnection final : public Connection {
 public:
  explicit LoopbackConnection(std::string name) : name_(std::move(name)) {}

  const std::string& name() const override { return name_; }
  Caps caps() const override { return {Access::kMap, Access::kGet}; }
  Status get_refused() const override { return {}; }
  PathCost cost(Access) const override { return {}; }
  void add_arena(const ArenaDesc& arena, UniqueFd fd) override { arenas_.add(arena, std::move(fd), name_); }
  RemoteRegion region(const MemoryDesc& memory) const override;
  Status get(uint64_t space, std::span<const Piece> pieces, std::span<const std::span<std::byte>> out) const override;

 private:
  std::string name_;
  ArenaTable arenas_;
};

}  // namespace tessera
