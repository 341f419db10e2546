// Memory of another process of this host: arenas mapped, private memory by process_vm_readv.
#pragma once

#include <string>

#include "base/process.h"
#include "transport/connection.h"
#include "transport/shm/key_table.h"

namespace tessera {

class ShmConnection final : public Connection {
 public:
  ShmConnection(const Incarnation& process, std::string name);

  const std::string& name() const override { return name_; }
  Caps caps() const override;
  Status get_refused() const override { return get_refused_; }
  PathCost cost(Access access) const override;  // measures once in each process (pull_cost.h)
  void add_key(uint32_t index, RemoteKey key) override;
  RemoteRegion region(const RemoteRange& range) const override;
  Status get(uint32_t key, std::span<const Piece> pieces, std::span<const std::span<std::byte>> out) const override;

 private:
  Status get_private(std::span<const Piece> pieces, std::span<const std::span<std::byte>> out) const;
  bool dead() const;

  Incarnation process_;
  std::string name_;
  UniqueFd pidfd_;
  Status get_refused_;  // for private memory; tried once
  KeyTable keys_;
};

}  // namespace tessera
