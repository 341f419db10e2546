// The schedules of random models, recorded: nothing that two operations touch is left unordered, whatever the timing.
// The slow lane checks many more. TESSERA_ETP_MODELS, TESSERA_ETP_SCHEDULES and TESSERA_ETP_FIRST choose others.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <numeric>

#include "etp/testing/generated_testing.h"

namespace tessera::etp {
namespace {

#ifdef TESSERA_SLOW_LANE
constexpr int kModels = 2000;
constexpr int kSchedules = 20;
#else
constexpr int kModels = 60;
constexpr int kSchedules = 5;
#endif

int from_environment(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

TEST(RecordedTest, NothingIsLeftUnorderedInAnyScheduleOfAnyModel) {
  const int first = from_environment("TESSERA_ETP_FIRST", 1);
  const int models = from_environment("TESSERA_ETP_MODELS", kModels);
  const int schedules = from_environment("TESSERA_ETP_SCHEDULES", kSchedules);
  size_t records = 0, accesses = 0;
  int64_t replays = 0, mapped = 0;
  for (int seed = first; seed < first + models; ++seed) {
    const GeneratedModel model = GeneratedModel::of(static_cast<uint64_t>(seed));
    const TrainingResult expected = train_unsharded(model);
    for (int schedule = 0; schedule < schedules; ++schedule) {
      TrainingResult found = room_for(model);
      const CheckedRun run = train_checked(model, static_cast<uint64_t>(schedule), found);
      ASSERT_EQ(run.finding(), "") << model.to_string() << ", schedule " << schedule;
      ASSERT_EQ(difference(expected, found), "") << model.to_string() << ", schedule " << schedule;
      ASSERT_EQ(run.report.unreached, 0u);
      ASSERT_GT(run.report.accesses, 0u);
      records += run.report.records;
      accesses += run.report.accesses;
      replays += std::accumulate(found.replays.begin(), found.replays.end(), int64_t{0});
      mapped += std::accumulate(found.mapped.begin(), found.mapped.end(), int64_t{0});
    }
  }
  if (models >= kModels) {
    EXPECT_GT(replays, models * schedules);
    EXPECT_GT(mapped, models * schedules);
  }
  std::printf(
      "%d models, %d schedules each: %zu records, %zu accesses, %lld replays, no conflict, no fault, no deadlock\n",
      models, schedules, records, accesses, static_cast<long long>(replays));
}

}  // namespace
}  // namespace tessera::etp
