#include "peer/handshake.h"

#include "base/message.h"

namespace tessera {

Status Detach::reason(const std::string& name) const {
  if (status.ok()) return failed(ErrorCode::kPeerLost, "{} has closed the batch"_message, name);
  return failed(status.code(), "{} has closed the batch: {}"_message, name, status.message());
}

}  // namespace tessera
