#include "transport/shm/key_table.h"

#include <utility>

#include "base/bytes.h"
#include "base/fail.h"
#include "base/socket.h"

namespace tessera {

// u8 kind; for an arena, also u32 id, u64 bytes.
RemoteKey KeyTable::make_key(Kind kind, const SharedArena* arena) {
  ByteWriter out;
  out.put(kind);
  if (arena != nullptr) {
    out.put(arena->id());
    out.put(static_cast<uint64_t>(arena->bytes()));
  }
  return {.transport = "shm", .device = DeviceKind::kHost, .bytes = out.take(), .fds = {}};
}

RemoteKey KeyTable::key_of_private_memory() {
  return make_key(Kind::kPrivate);
}
RemoteKey KeyTable::key_of_packed_memory() {
  return make_key(Kind::kPacked);
}
RemoteKey KeyTable::key_of(SharedArena& arena) {
  RemoteKey key = make_key(Kind::kArena, &arena);
  key.fds.push_back(duplicate_fd(arena.fd_for_peer()));
  return key;
}

KeyTable::Entry KeyTable::read(const RemoteKey& key, uint64_t& arena_bytes) {
  ByteReader in(key.bytes, "a key of shm");
  Entry entry;
  entry.kind = in.get_enum(Kind::kPacked);
  if (entry.kind == Kind::kArena) {
    entry.arena_id = in.get<uint32_t>();
    arena_bytes = in.get<uint64_t>();
    if (arena_bytes == 0 || arena_bytes > uint64_t{INT64_MAX})
      fail(ErrorCode::kInvalidArgument, "arena {}: a size of {} bytes"_message, entry.arena_id, arena_bytes);
  }
  in.finish();
  return entry;
}

void KeyTable::add(uint32_t index, RemoteKey key, const std::string& owner) {
  uint64_t bytes = 0;
  Entry entry = read(key, bytes);
  const size_t fds = entry.kind == Kind::kArena ? 1 : 0;
  if (key.fds.size() != fds)
    fail(ErrorCode::kInvalidArgument, "shared memory of {}: key {} with {} descriptors, it has {}"_message, owner,
         index, key.fds.size(), fds);
  if (keys_.contains(index))
    fail(ErrorCode::kInvalidArgument, "shared memory of {}: key {} came twice"_message, owner, index);
  if (fds == 1) entry.arena = std::make_unique<const MappedArena>(std::move(key.fds.front()), bytes, owner);
  keys_.emplace(index, std::move(entry));
}

RemoteRegion KeyTable::region(const RemoteRange& range, const std::string& owner) const {
  const auto found = keys_.find(range.key);
  if (found == keys_.end())
    fail(ErrorCode::kInvalidArgument, "shared memory of {}: key {} was never given"_message, owner, range.key);
  const Entry& entry = found->second;
  if (entry.kind == Kind::kPacked) return {.caps = {Access::kStream}, .key = range.key};
  RemoteRegion region{.caps = {Access::kGet, Access::kStream}, .key = range.key, .offset = range.offset};
  if (entry.kind == Kind::kPrivate) return region;
  const MappedArena& arena = *entry.arena;
  if (range.offset > arena.bytes() || range.bytes > arena.bytes() - range.offset)
    fail(ErrorCode::kInvalidArgument, "shared memory of {}: {} bytes at {} leave arena {} of {} bytes"_message, owner,
         range.bytes, range.offset, entry.arena_id, arena.bytes());
  region.caps = {Access::kGet};
  if (arena.data() == nullptr) return region;
  region.caps = {Access::kMap, Access::kGet};
  region.mapped = arena.data() + range.offset;
  return region;
}

const MappedArena* KeyTable::arena(uint32_t key) const {
  return keys_.at(key).arena.get();
}

}  // namespace tessera
