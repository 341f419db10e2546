// The two life cycles of a weight on a rank: of a consumption (its gather) and of a round of gradients (its reduction).
//
//   NONE --start--> ASYNC_WAIT --arrive--> DATA_READY --release--> NONE        a prefetch; a deferred reduction
//   NONE --run_now--> DATA_READY_SYNC --release--> NONE                        on demand; an inline reduction
//
// Every step is checked, always. Values; not thread-safe.
#pragma once

#include <cstdint>
#include <string_view>

namespace tessera::etp {

enum class WeightState : uint8_t { kNone, kAsyncWait, kDataReady, kDataReadySync };
std::string_view to_string(WeightState state);  // "NONE", "ASYNC_WAIT", "DATA_READY", "DATA_READY_SYNC"

// What moves: the gather of a consumption, or the reduction of a round.
enum class Movement : uint8_t { kGather, kReduction };
std::string_view to_string(Movement movement);  // "gather", "reduction"

enum class StateStep : uint8_t {
  kStart,    // issued in the background
  kArrive,   // waited for: its data is there
  kRunNow,   // issued and waited for at once
  kRelease,  // used: the buffer is free, or the gradient is added
};
std::string_view to_string(StateStep step);  // "start", "arrive", "run_now", "release"

class StateMachine {
 public:
  explicit StateMachine(Movement movement) : movement_(movement) {}

  WeightState state() const { return state_; }

  // Throws Error(kInternal) that names `weight`, the state, the step and `call` (whose caller has a bug) for a step
  // that is not possible; the state stays.
  void apply(StateStep step, std::string_view weight, std::string_view call);
  // After an error, when nothing of the weight is in flight any longer.
  void reset() { state_ = WeightState::kNone; }

 private:
  Movement movement_;
  WeightState state_ = WeightState::kNone;
};

}  // namespace tessera::etp
