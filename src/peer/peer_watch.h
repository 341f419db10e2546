// Watches the processes that a call waits for while it has no connection with them. On this host the kernel reports
// that one has ended, and its state is polled to see whether it is stopped. For other hosts nothing is known yet.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/event_loop.h"
#include "base/process.h"
#include "tessera/error.h"

namespace tessera {

// Thread-safe while the loop exists. Must not be destroyed on the loop's thread.
class PeerWatch {
 public:
  struct Peer {
    std::string name;  // "trainer/3"
    Incarnation process;
    std::optional<Incarnation> worker;  // whose agent it is
  };

  // Calls `changed` on the loop's thread once a peer's process has ended, also if it had ended before, and each time
  // one is found to be stopped. `changed` must not block. It is not called after this is destroyed.
  PeerWatch(EventLoop& loop, std::vector<Peer> peers, std::function<void()> changed);
  ~PeerWatch();
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;

  // kPeerLost if the peer's process or its worker is stopped. liveness_of() tells whether it has ended.
  Status stopped(size_t peer) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace tessera
