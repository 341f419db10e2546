// Lets worker threads tell the event loop that something has happened.
#pragma once

#include <atomic>
#include <functional>
#include <memory>

#include "base/event_loop.h"

namespace tessera {

// A callback on the loop's thread that any thread can request. Its owner makes and destroys it, the latter on the
// loop's thread or after that has ended. The callback does not run afterwards, even if it was requested.
class LoopSignal {
 public:
  LoopSignal(EventLoop& loop, std::function<void()> callback);
  ~LoopSignal();
  LoopSignal(const LoopSignal&) = delete;
  LoopSignal& operator=(const LoopSignal&) = delete;

  // Requests one call. Further requests before the call begins have no effect. Allocates nothing itself.
  void raise();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace tessera
