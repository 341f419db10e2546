#define XXH_INLINE_ALL
#include "peer/handshake.h"

#include <xxhash.h>

#include <cstring>

#include "base/fail.h"
#include "base/message.h"

namespace tessera {
namespace {

constexpr uint16_t kFirstWithCheck = 5;  // protocol

}  // namespace

std::vector<std::byte> hello_payload(const Hello& hello) {
  ByteWriter out;
  write_fields(hello, out);
  out.put(XXH3_64bits(out.view().data(), out.view().size()));
  return out.take();
}

void require_unchanged_hello(uint16_t version, std::span<const std::byte> payload) {
  if (version < kFirstWithCheck) return;
  uint64_t check = 0;
  const bool whole = payload.size() >= sizeof(check);
  const auto message = payload.first(whole ? payload.size() - sizeof(check) : 0);
  if (whole) std::memcpy(&check, payload.data() + message.size(), sizeof(check));
  if (!whole || check != XXH3_64bits(message.data(), message.size()))
    fail(ErrorCode::kUnavailable, "a Hello is not what was sent: it was changed on its way"_message);
}

Status Detach::reason(const std::string& name) const {
  if (status.ok()) return failed(ErrorCode::kPeerLost, "{} has closed the batch"_message, name);
  return failed(status.code(), "{} has closed the batch: {}"_message, name, status.message());
}

}  // namespace tessera
