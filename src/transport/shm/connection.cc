#include "transport/shm/connection.h"

#include <poll.h>

#include <utility>

#include "base/fail.h"
#include "transport/scatter.h"
#include "transport/shm/pull_cost.h"
#include "transport/shm/remote_read.h"

namespace tessera {

ShmConnection::ShmConnection(const Incarnation& process, std::string name)
    : process_(process), name_(std::move(name)), pidfd_(open_pidfd(process)) {
  // Without a pidfd a number could come to mean another process.
  get_refused_ = pidfd_ ? probe_remote_read(process_.pid)
                        : failed(ErrorCode::kPermissionDenied, "{}: no pidfd of {}", name_, process_.to_string());
}

Caps ShmConnection::caps() const {
  const Caps all{Access::kMap, Access::kGet, Access::kStream};
  return get_refused_.ok() ? all : all.without(Access::kGet);
}

PathCost ShmConnection::cost(Access access) const {
  return access == Access::kStream ? pull_costs().ring : pull_costs().readv;
}

void ShmConnection::add_arena(const ArenaDesc& arena, UniqueFd fd) {
  arenas_.add(arena, std::move(fd), name_);
}

RemoteRegion ShmConnection::region(const MemoryDesc& memory) const {
  if (memory.kind != MemoryDesc::Kind::kPrivate) return arenas_.region(memory, name_);
  return {.caps = caps().without(Access::kMap), .space = ArenaTable::kNoArena, .offset = memory.offset};
}

Status ShmConnection::get(uint64_t space, std::span<const Piece> pieces,
                          std::span<const std::span<std::byte>> out) const {
  return space == ArenaTable::kNoArena ? get_private(pieces, out) : arenas_.get(space, pieces, out);
}

// The process must have lived through the whole request: then the pid was its own all the time.
Status ShmConnection::get_private(std::span<const Piece> pieces, std::span<const std::span<std::byte>> out) const {
  const auto lost = [&] { return failed(ErrorCode::kPeerLost, "{}: {} died", name_, process_.to_string()); };
  if (dead()) return lost();
  RemoteReader reader(process_.pid);
  Status status = scatter(pieces, out, [&](uint64_t offset, std::span<std::byte> part) {
    return reader.add(offset, part.data(), part.size());
  });
  if (status.ok()) status = reader.flush();
  if (dead()) return lost();
  if (!status.ok()) return Status(status.code(), fmt::format("{}: {}", name_, status.message()));
  return status;
}

bool ShmConnection::dead() const {
  pollfd poll{.fd = pidfd_.get(), .events = POLLIN, .revents = 0};
  return !pidfd_ || ::poll(&poll, 1, 0) != 0;
}

}  // namespace tessera
