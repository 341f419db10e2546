#include "peer/handshake.h"

namespace tessera {

Status Detach::reason(const std::string& name) const {
  if (status.ok()) return failed(ErrorCode::kPeerLost, "{} has closed the batch", name);
  return failed(status.code(), "{} has closed the batch: {}", name, status.message());
}

}  // namespace tessera
