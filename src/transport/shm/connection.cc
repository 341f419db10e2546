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
  if (pidfd_)
    get_refused_ = probe_remote_read(process_.pid);
  else if (liveness_of(process_) == Liveness::kDead)
    get_refused_ = failed(ErrorCode::kPeerLost, "{}: {} cannot be asked for its memory: it has ended"_message, name_,
                          process_.to_string());
  else  // the pid could come to mean another process
    get_refused_ = failed(ErrorCode::kPermissionDenied, "{}: no pidfd of {}"_message, name_, process_.to_string());
}

Caps ShmConnection::caps() const {
  const Caps all{Access::kMap, Access::kGet, Access::kStream};
  return get_refused_.ok() ? all : all.without(Access::kGet);
}

PathCost ShmConnection::cost(Access access) const {
  return access == Access::kStream ? pull_costs().ring : pull_costs().readv;
}

void ShmConnection::add_key(uint32_t index, RemoteKey key) {
  keys_.add(index, std::move(key), name_);
}

RemoteRegion ShmConnection::region(const RemoteRange& range) const {
  RemoteRegion region = keys_.region(range, name_);
  if (keys_.arena(range.key) == nullptr && !get_refused_.ok()) region.caps = region.caps.without(Access::kGet);
  return region;
}

Status ShmConnection::get(uint32_t key, std::span<const Piece> pieces,
                          std::span<const std::span<std::byte>> out) const {
  const MappedArena* const arena = keys_.arena(key);
  if (arena == nullptr) return get_private(pieces, out);
  return scatter(pieces, out, [&](uint64_t offset, std::span<std::byte> part) { return arena->read(offset, part); });
}

// The process must have lived through the whole request: then the pid was its own throughout.
Status ShmConnection::get_private(std::span<const Piece> pieces, std::span<const std::span<std::byte>> out) const {
  const auto lost = [&] { return failed(ErrorCode::kPeerLost, "{}: {} died"_message, name_, process_.to_string()); };
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
