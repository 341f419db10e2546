#include "etp/schedule/states.h"

#include <array>
#include <utility>

#include "base/fail.h"
#include "layout/text_reader.h"

namespace tessera::etp {
namespace {

using enum WeightState;

struct Transition {
  StateStep step;
  WeightState from;
  WeightState to;
};
constexpr std::array kTransitions{
    Transition{StateStep::kStart, kNone, kAsyncWait},       Transition{StateStep::kArrive, kAsyncWait, kDataReady},
    Transition{StateStep::kRelease, kDataReady, kNone},     Transition{StateStep::kRunNow, kNone, kDataReadySync},
    Transition{StateStep::kRelease, kDataReadySync, kNone},
};

}  // namespace

std::string_view to_string(WeightState state) {
  constexpr std::array<std::string_view, 4> kNames{"NONE", "ASYNC_WAIT", "DATA_READY", "DATA_READY_SYNC"};
  return kNames.at(static_cast<size_t>(state));
}

std::string_view to_string(Movement movement) {
  return movement == Movement::kGather ? "gather" : "reduction";
}

std::string_view to_string(StateStep step) {
  constexpr std::array<std::string_view, 4> kNames{"start", "arrive", "run_now", "release"};
  return kNames.at(static_cast<size_t>(step));
}

void StateMachine::apply(StateStep step, std::string_view weight, std::string_view call) {
  for (const Transition& transition : kTransitions) {
    if (transition.step != step || transition.from != state_) continue;
    state_ = transition.to;
    return;
  }
  fail_internal("weight {}: {} in state {} of its {}: the step {} is not possible there", tessera::quoted(weight), call,
                to_string(state_), to_string(movement_), to_string(step));
}

}  // namespace tessera::etp
