// Random models, trained by 1 to 4 ranks in every order of their streams that the seed draws, and by an unsharded
// program: the same bits. TESSERA_ETP_MODELS and TESSERA_ETP_SCHEDULES say how many of each.
#include <gtest/gtest.h>

#include <cstdlib>

#include "etp/testing/generated_testing.h"

namespace tessera::etp {
namespace {

int from_environment(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

TEST(GeneratedTest, NativeWeightsAreDrawnOfEveryKind) {
  int matrices = 0, stacks = 0, without_masters = 0;
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    const GeneratedModel model = GeneratedModel::of(seed);
    for (const GeneratedModel::Layer& layer : model.layers) {
      const WeightSpec& spec = model.weights[layer.weights.front()];
      if (spec.native) ++(layer.stacked ? stacks : matrices);
      if (spec.planes_only) ++without_masters;
    }
  }
  EXPECT_GT(matrices, 10);
  EXPECT_GT(stacks, 2);
  EXPECT_GT(without_masters, 2);
}

TEST(GeneratedTest, EveryScheduleOfEveryModelGivesTheBitsOfTheUnshardedProgram) {
  const int models = from_environment("TESSERA_ETP_MODELS", 100);
  const int schedules = from_environment("TESSERA_ETP_SCHEDULES", 5);
  const int first = from_environment("TESSERA_ETP_FIRST", 1);
  for (int seed = first; seed < first + models; ++seed) {
    const GeneratedModel model = GeneratedModel::of(static_cast<uint64_t>(seed));
    const TrainingResult expected = train_unsharded(model);
    for (int schedule = 0; schedule < schedules; ++schedule) {
      TrainingResult found = room_for(model);
      const std::string error = train_in_schedule(model, static_cast<uint64_t>(schedule), found);
      ASSERT_EQ(error, "") << model.to_string() << ", schedule " << schedule;
      ASSERT_EQ(difference(expected, found), "") << model.to_string() << ", schedule " << schedule;
    }
  }
}

}  // namespace
}  // namespace tessera::etp
