#include "etp/schedule/states.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <vector>

#include "tessera/error.h"

namespace tessera::etp {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using enum WeightState;
using enum StateStep;

StateMachine in(WeightState state, Movement movement) {
  const std::map<WeightState, std::vector<StateStep>> ways{
      {kNone, {}}, {kAsyncWait, {kStart}}, {kDataReady, {kStart, kArrive}}, {kDataReadySync, {kRunNow}}};
  StateMachine machine(movement);
  for (const StateStep step : ways.at(state)) machine.apply(step, "w", "test");
  EXPECT_EQ(machine.state(), state);
  return machine;
}

TEST(States, OnlyTheStepsOfTheContractArePossible) {
  const std::map<std::pair<WeightState, StateStep>, WeightState> legal{
      {{kNone, kStart}, kAsyncWait},   {{kNone, kRunNow}, kDataReadySync},  {{kAsyncWait, kArrive}, kDataReady},
      {{kDataReady, kRelease}, kNone}, {{kDataReadySync, kRelease}, kNone},
  };
  for (const Movement movement : {Movement::kGather, Movement::kReduction})
    for (const WeightState state : {kNone, kAsyncWait, kDataReady, kDataReadySync})
      for (const StateStep step : {kStart, kArrive, kRunNow, kRelease}) {
        SCOPED_TRACE(testing::Message() << to_string(state) << " " << to_string(step));
        StateMachine machine = in(state, movement);
        const auto next = legal.find({state, step});
        if (next != legal.end()) {
          machine.apply(step, "w", "test");
          EXPECT_EQ(machine.state(), next->second);
        } else {
          EXPECT_THROW(machine.apply(step, "w", "test"), Error);
          EXPECT_EQ(machine.state(), state);
        }
      }
}

TEST(States, AnErrorNamesWeightStateAndCall) {
  StateMachine machine = in(kDataReady, Movement::kReduction);
  try {
    machine.apply(kStart, "layers.3.mlp.weight", "produce()");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInternal);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("layers.3.mlp.weight"), HasSubstr("DATA_READY of its reduction"),
                                    HasSubstr("produce()"), HasSubstr("start")));
  }
  machine.reset();
  EXPECT_EQ(machine.state(), kNone);
}

}  // namespace
}  // namespace tessera::etp
