// Asks an agent of this machine for its report. It blocks, and the caller needs no agent.
#pragma once

#include <string>

#include "base/clock.h"
#include "base/fd.h"
#include "base/framing.h"
#include "peer/report.h"

namespace tessera {

// One question. To ask many agents, ask all of them and then read the answers: that takes one round trip, and one
// deadline if some of them are stopped. Move-only.
class Inspection {
 public:
  // Asks the agent whose socket has that address. Throws Error: kUnavailable if nobody listens there, kPermissionDenied
  // if another user does.
  Inspection(const std::string& address, Deadline deadline);
  // To be called once. Throws kDeadlineExceeded (a stopped process), kPeerLost, and the agent's error if it refuses.
  Report answer(Deadline deadline);

 private:
  UniqueFd socket_;
  FrameReader reader_;
};

}  // namespace tessera
