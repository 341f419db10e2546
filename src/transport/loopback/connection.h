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
  void add_arena(const ArenaDesc& arena, UniqueFd fd) override { arenas_.add(arena, std::move(fd), name_); }
  const std::byte* mapped(const MemoryDesc& memory) const override;
  Status get(const MemoryDesc& memory, std::span<const Piece> pieces,
             std::span<const std::span<std::byte>> out) const override;
  bool can_get_private() const override { return true; }

 private:
  std::string name_;
  ArenaTable arenas_;
};

}  // namespace tessera
