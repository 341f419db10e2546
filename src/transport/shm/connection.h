// Memory of another process of this host: arenas mapped, private memory by process_vm_readv.
#pragma once

#include <string>

#include "base/process.h"
#include "transport/arena_table.h"
#include "transport/connection.h"

namespace tessera {

class ShmConnection final : public Connection {
 public:
  ShmConnection(const Incarnation& process, std::string name);

  const std::string& name() const override { return name_; }
  void add_arena(const ArenaDesc& arena, UniqueFd fd) override;
  const std::byte* mapped(const MemoryDesc& memory) const override;
  Status get(const MemoryDesc& memory, std::span<const Piece> pieces,
             std::span<const std::span<std::byte>> out) const override;
  bool can_get_private() const override { return can_get_private_; }

 private:
  Status get_private(const MemoryDesc& memory, std::span<const Piece> pieces,
                     std::span<const std::span<std::byte>> out) const;
  bool dead() const;

  Incarnation process_;
  std::string name_;
  UniqueFd pidfd_;
  bool can_get_private_ = false;
  ArenaTable arenas_;
};

}  // namespace tessera
