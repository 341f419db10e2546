#include "transport/loopback/connection.h"

#include <cstring>

#include "base/fail.h"
#include "transport/scatter.h"

namespace tessera {

void LoopbackConnection::add_key(uint32_t index, RemoteKey key) {
  if (!key.bytes.empty() || !key.fds.empty())
    fail(ErrorCode::kInvalidArgument, "memory of {}: key {} of loopback with {} bytes and {} descriptors"_message,
         name_, index, key.bytes.size(), key.fds.size());
}

RemoteRegion LoopbackConnection::region(const RemoteRange& range) const {
  const auto* const data = reinterpret_cast<const std::byte*>(range.offset);
  return {.caps = caps(), .mapped = data, .key = range.key, .offset = range.offset};
}

Status LoopbackConnection::get(uint32_t /*key*/, std::span<const Piece> pieces,
                               std::span<const std::span<std::byte>> out) const {
  return scatter(pieces, out, [](uint64_t offset, std::span<std::byte> part) {
    std::memcpy(part.data(), reinterpret_cast<const std::byte*>(offset), part.size());
    return Status();
  });
}

}  // namespace tessera
