// How worker threads tell the event loop that something has happened.
#pragma once

#include <atomic>
#include <functional>
#include <memory>

#include "base/event_loop.h"

namespace tessera {

// A callback on the loop's thread that any thread can ask for. Made and destroyed by its owner; once it is destroyed,
// on the loop's thread or after it has ended, the callback does not run any more, asked for or not.
class LoopSignal {
 public:
  LoopSignal(EventLoop& loop, std::function<void()> callback);
  ~LoopSignal();
  LoopSignal(const LoopSignal&) = delete;
  LoopSignal& operator=(const LoopSignal&) = delete;

  // Asks for one call; asking again before it has begun changes nothing. Allocates nothing itself.
  void raise();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace tessera
