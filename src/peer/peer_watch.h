// What becomes of the processes that a call waits for, while it has no connection with them. Of this host, where the
// kernel tells of an end, and a look of a stop; of another host nothing is known yet.
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

// Thread-safe, as long as the loop is there; not to be destroyed on its thread.
class PeerWatch {
 public:
  struct Peer {
    std::string name;  // "trainer/3"
    Incarnation process;
    std::optional<Incarnation> worker;  // whose agent it is
  };

  // Calls `changed` once a peer's process has ended, also if it had before, and each time one is found to be stopped;
  // on the loop's thread. It must not block, and is not called any more once this is destroyed.
  PeerWatch(EventLoop& loop, std::vector<Peer> peers, std::function<void()> changed);
  ~PeerWatch();
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;

  // kPeerLost if it, or its worker, is stopped. liveness_of() tells whether it has ended.
  Status stopped(size_t peer) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace tessera
