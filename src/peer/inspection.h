// Asks an agent of this machine for its report; blocking, without an agent of its own.
#pragma once

#include <string>

#include "base/clock.h"
#include "base/fd.h"
#include "base/framing.h"
#include "peer/report.h"

namespace tessera {

// One question. Asking many at once and reading the answers afterwards costs one round, and one deadline where some
// are stopped. Move-only.
class Inspection {
 public:
  // Asks the agent whose socket that is. Throws Error: kUnavailable where nobody listens, kPermissionDenied where
  // another user does.
  Inspection(const std::string& address, Deadline deadline);
  // Once. Throws kDeadlineExceeded (a stopped process), kPeerLost, and what the agent refuses with.
  Report answer(Deadline deadline);

 private:
  UniqueFd socket_;
  FrameReader reader_;
};

}  // namespace tessera
