#include "peer/loop_signal.h"

#include <utility>

namespace tessera {

struct LoopSignal::State {
  EventLoop& loop;
  std::function<void()> callback;
  std::atomic<bool> alive{true};
  std::atomic<bool> raised{false};
  std::shared_ptr<State> queued;  // while raised: keeps the state until the loop has seen it

  void serve() {
    const std::shared_ptr<State> self = std::move(queued);
    raised.store(false, std::memory_order_release);
    if (alive.load(std::memory_order_acquire)) callback();
  }
};

LoopSignal::LoopSignal(EventLoop& loop, std::function<void()> callback)
    : state_(new State{.loop = loop, .callback = std::move(callback), .queued = {}}) {}

LoopSignal::~LoopSignal() {
  state_->alive.store(false, std::memory_order_release);
}

void LoopSignal::raise() {
  State& state = *state_;
  if (state.raised.exchange(true, std::memory_order_acq_rel)) return;
  state.queued = state_;
  // A lambda with one pointer fits into std::function without an allocation.
  if (!state.loop.post([&state] { state.serve(); })) state.queued.reset();
}

}  // namespace tessera
