// This process's own memory, accessed as if it were a peer's: an offset is an address.
#pragma once

#include <string>
#include <utility>

#include "transport/connection.h"

namespace tessera {

class LoopbackConnection final : public Connection {
 public:
  explicit LoopbackConnection(std::string name) : name_(std::move(name)) {}

  const std::string& name() const override { return name_; }
  Caps caps() const override { return {Access::kMap, Access::kGet}; }
  Status get_refused() const override { return {}; }
  PathCost cost(Access) const override { return {}; }
  void add_key(uint32_t index, RemoteKey key) override;
  RemoteRegion region(const RemoteRange& range) const override;
  Status get(uint32_t key, std::span<const Piece> pieces, std::span<const std::span<std::byte>> out) const override;

 private:
  std::string name_;
};

}  // namespace tessera
