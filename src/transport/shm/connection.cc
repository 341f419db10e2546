#include "transport/shm/connection.h"

#include <poll.h>

#include <utility>

#include "base/fail.h"
#include "transport/scatter.h"
#include "transport/shm/remote_read.h"

namespace tessera {

ShmConnection::ShmConnection(const Incarnation& process, std::string name)
    : process_(process), name_(std::move(name)), pidfd_(open_pidfd(process)) {
  // Without a pidfd a number could come to mean another process.
  can_get_private_ = pidfd_ && probe_remote_read(process_.pid).ok();
}

void ShmConnection::add_arena(const ArenaDesc& arena, UniqueFd fd) {
  arenas_.add(arena, std::move(fd), name_);
}

const std::byte* ShmConnection::mapped(const MemoryDesc& memory) const {
  if (memory.kind != MemoryDesc::Kind::kShared) return nullptr;
  const std::byte* arena = arenas_.find(memory, name_).data();
  return arena == nullptr ? nullptr : arena + memory.offset;
}

Status ShmConnection::get(const MemoryDesc& memory, std::span<const Piece> pieces,
                          std::span<const std::span<std::byte>> out) const {
  if (memory.kind == MemoryDesc::Kind::kRingOnly)
    return failed(ErrorCode::kPermissionDenied, "{}: memory that it packs into a ring itself is not to be read", name_);
  if (memory.kind == MemoryDesc::Kind::kPrivate) return get_private(memory, pieces, out);
  const MappedArena& arena = arenas_.find(memory, name_);
  return scatter(pieces, out,
                 [&](uint64_t offset, std::span<std::byte> part) { return arena.read(memory.offset + offset, part); });
}

// The process must have lived through the whole request: then the pid was its own all the time.
Status ShmConnection::get_private(const MemoryDesc& memory, std::span<const Piece> pieces,
                                  std::span<const std::span<std::byte>> out) const {
  const auto lost = [&] { return failed(ErrorCode::kPeerLost, "{}: {} died", name_, process_.to_string()); };
  if (dead()) return lost();
  RemoteReader reader(process_.pid);
  Status status = scatter(pieces, out, [&](uint64_t offset, std::span<std::byte> part) {
    return reader.add(memory.offset + offset, part.data(), part.size());
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
