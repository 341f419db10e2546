// Each of the mistakes that base/mutation.h can make here is found by what must find it. The table of all that found it
// is printed.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/mutation.h"
#include "base/testing.h"
#include "collective/bootstrap.h"
#include "collective/group.h"
#include "device/record/sinks.h"
#include "device/virtual/virtual_world.h"
#include "etp/etp_testing.h"
#include "etp/gather_memory.h"
#include "etp/testing/generated_testing.h"

namespace tessera::etp {
namespace {

class Mutated {
 public:
  explicit Mutated(Mutation which) { mutation().store(which); }
  ~Mutated() { mutation().store(Mutation::kNone); }
  Mutated(const Mutated&) = delete;
  Mutated& operator=(const Mutated&) = delete;
};

// What finds mistakes. An error of a run is sorted by its text.
constexpr const char* kChecker = "checker";    // accesses that nothing orders, in the logs of all ranks
constexpr const char* kBits = "bits";          // another result than the unsharded program's
constexpr const char* kDeadlock = "deadlock";  // of the virtual ranks
constexpr const char* kStamp = "stamp";        // of a buffer
constexpr const char* kState = "state";        // machine of a buffer or an event
constexpr const char* kWords = "words";        // that say what cannot be
constexpr const char* kHook = "hook";          // the program's, which looks at what was added
constexpr const char* kRows = "rows";          // the program's, which compares them with the weight's
constexpr const char* kError = "error";        // another one

const char* catcher_of(std::string_view error) {
  const auto has = [&](std::string_view part) { return error.find(part) != std::string_view::npos; };
  if (has("is wanted, and the buffer holds")) return kStamp;
  if (has("is not possible there")) return kState;
  if (has("is reported and not folded")) return kHook;
  if (has(" of weight ") && has(", which has ")) return kRows;
  if (has("before all ranks retired") || has("does not show gradient") || has("did not drain")) return kWords;
  return has("deadlock after") ? kDeadlock : kError;
}

struct Catchers {
  std::set<std::string> names{};
  std::string first{};  // finding

  void add(const char* name, const std::string& finding) {
    if (names.empty()) {
      first = finding;
      std::ranges::replace(first, '\n', ' ');
    }
    names.insert(name);
  }
};

struct Mistake {
  Mutation mutation;
  const char* name;
  std::set<std::string> expected{};  // all of these
};

// By random models: until all that must find it have, but a few models in any case.
Catchers by_random_models(const Mistake& mistake) {
  constexpr int kFewModels = 8, kMostModels = 200, kSchedules = 4;
  Catchers catchers;
  const auto is_found = [&] { return std::ranges::includes(catchers.names, mistake.expected); };
  for (int seed = 1; seed <= kMostModels && !(seed > kFewModels && is_found()); ++seed) {
    const GeneratedModel model = GeneratedModel::of(static_cast<uint64_t>(seed));
    const TrainingResult expected = train_unsharded(model);
    for (uint64_t schedule = 0; schedule < kSchedules; ++schedule) {
      TrainingResult found = room_for(model), recorded = found;
      const Mutated mutated(mistake.mutation);
      std::string error = train_in_schedule(model, schedule, found);
      if (!error.empty())
        catchers.add(catcher_of(error), error);
      else if (std::string differs = difference(expected, found); !differs.empty())
        catchers.add(kBits, differs);
      const CheckedRun run = train_checked(model, schedule, recorded);
      if (!run.report.conflicts.empty()) catchers.add(kChecker, run.report.conflicts.front().to_string());
    }
  }
  return catchers;
}

// Ranks that stop in the middle of a pass have gathers under way when they update.
CheckedRun stop_in_the_middle(uint64_t schedule) {
  std::vector<device::RankLog> logs;
  for (int rank = 0; rank < 2; ++rank) logs.emplace_back(device::LogHead{.run = 1, .rank = rank, .ranks = 2});
  device::VirtualWorld world(schedule);
  for (int rank = 0; rank < 2; ++rank)
    world.device(rank).recorder().start(device::sink_to(logs[static_cast<size_t>(rank)]));
  CheckedRun run;
  collective::InProcessExchange exchange(2);
  try {
    world.run(2, [&](int rank) {
      device::Device& device = world.device(rank);
      ShardGroup group(
          collective::Group::form(exchange.of_rank(rank, device, seconds(60)),
                                  {.rank = rank, .size = 2, .device = &device, .slots = 8, .in_process = true}));
      Runtime runtime(group, {.prefetch = PrefetchMode::kOn, .distance = 3, .inline_bytes = 0});
      std::vector<WeightId> weights;
      for (const char* name : {"a", "b", "c", "d"})
        weights.push_back(runtime.add({.name = name, .rows = 32, .columns = 4}));
      runtime.start();
      for (const size_t used : {4, 1, 1, 1}) {
        for (size_t i = 0; i < used; ++i) runtime.acquire(weights[i], Phase::kForward);
        runtime.update(weights, [] {});
      }
      group.close();
    });
  } catch (const Error& error) {
    run.error = error.what();
  }
  for (int rank = 0; rank < 2; ++rank) world.device(rank).recorder().stop();
  run.report = device::check_schedule(logs);
  return run;
}

Catchers by_ranks_that_stop_in_the_middle(const Mistake& mistake) {
  constexpr uint64_t kSchedules = 50;
  Catchers catchers;
  for (uint64_t schedule = 0; schedule < kSchedules; ++schedule) {
    const CheckedRun right = stop_in_the_middle(schedule);
    EXPECT_EQ(right.error, "");
    EXPECT_TRUE(right.report.ok());
    const Mutated mutated(mistake.mutation);
    const CheckedRun run = stop_in_the_middle(schedule);
    if (!run.error.empty()) catchers.add(catcher_of(run.error), run.error);
    if (!run.report.conflicts.empty()) catchers.add(kChecker, run.report.conflicts.front().to_string());
  }
  return catchers;
}

// Two uses of a weight that overlap need two buffers.
Catchers by_two_uses_at_once(const Mistake& mistake) {
  const auto wrong = [] {
    std::atomic<int64_t> elements = 0;
    run_ranks(2, [&](const ShardGroup& group) {
      Runtime runtime(group, {.prefetch = PrefetchMode::kOff, .check = true});
      const WeightId w = runtime.add({.name = "w", .rows = 40, .columns = 8});
      fill_shard(runtime, w, 1);
      runtime.start();
      const FullWeight first = runtime.acquire(w, Phase::kForward);
      const FullWeight second = runtime.acquire(w, Phase::kForward);
      elements += wrong_elements(first, w, 1) + wrong_elements(second, w, 1);
      group.impl()->barrier("the end");
    });
    return elements.load();
  };
  EXPECT_EQ(wrong(), 0);
  Catchers catchers;
  const Mutated mutated(mistake.mutation);
  if (const int64_t elements = wrong(); elements > 0)
    catchers.add(kBits, std::to_string(elements) + " elements of a gathered weight are wrong");
  return catchers;
}

// A stamp tells of other mistakes, so it is itself asked about a buffer that holds something else.
Catchers by_a_wrong_buffer(const Mistake& mistake) {
  const auto device = device::make_device(DeviceKind::kHost);
  GatherMemory memory(device, *device, device->caller(), {});
  const auto weight = make_parameter(shard_weight(0, {.name = "w", .rows = 20, .columns = 4}, 0, 2, {}), *device);
  const std::array<Parameter*, 1> list{weight.get()};
  std::vector<GatherMemory::Taken> taken;
  weight->publication.version = 3;
  memory.take(list, Plane::kRow, StateStep::kRunNow, {}, taken);
  weight->publication.version = 4;
  const auto ask = [&] { return error_of([&] { memory.use({&taken.front().slot, 1}, list, Plane::kRow, true); }); };
  EXPECT_EQ(catcher_of(ask()), kStamp);
  Catchers catchers;
  const Mutated mutated(mistake.mutation);
  if (const std::string answer = ask(); catcher_of(answer) != kStamp)
    catchers.add(kStamp, "a buffer of version 3 is taken for version 4: " + answer);
  return catchers;
}

void print_row(const Mistake& mistake, const Catchers& catchers) {
  std::string names;
  for (const std::string& name : catchers.names) names += (names.empty() ? "" : ", ") + name;
  std::printf("| %-31s | %-38s | %.120s |\n", mistake.name, names.c_str(), catchers.first.c_str());
  std::fflush(stdout);  // a mistake may end the process
}

TEST(MutationTest, EachIsFoundByWhatMustFindIt) {
  using Find = Catchers (*)(const Mistake&);
  struct Row {
    Mistake mistake;
    Find find = by_random_models;
  };
  const Row rows[] = {
      {{Mutation::kNoWriteAfterRead, "no write-after-read edge", {kChecker, kBits}}},
      {{Mutation::kNeighboursShareBuffer, "neighbours share a buffer", {kChecker, kBits}}},
      {{Mutation::kSkippedWait, "skipped wait", {kChecker, kBits}}},
      {{Mutation::kHookBeforeAdd, "hook before add", {kChecker, kHook}}},
      {{Mutation::kLastReductionDropped, "last reduction dropped", {kBits}}},
      {{Mutation::kPaddingInLogicalRows, "padding in a checkpoint", {kRows}}},
      {{Mutation::kLocalAmax, "local amax", {kBits}}},
      {{Mutation::kUnorderedIteration, "unordered iteration", {kBits}}},
      {{Mutation::kCapturedAddressReused, "captured address reused", {kBits}}, by_two_uses_at_once},
      {{Mutation::kCaptureNotReserved, "captured buffer lent to others", {kChecker, kBits}}},
      {{Mutation::kStampNotCompared, "stamp not compared", {kStamp}}, by_a_wrong_buffer},
      {{Mutation::kFoldFromZero, "fold from zero", {kBits}}},
      {{Mutation::kFoldsOutOfOrder, "folds out of order", {kDeadlock}}},
      {{Mutation::kRetireNotAwaited, "retire not awaited", {kChecker, kWords}}, by_ranks_that_stop_in_the_middle},
      {{Mutation::kGradientReturnedEarly, "gradient buffer returned early", {kChecker, kBits}}},
      {{Mutation::kWordBeforeData, "word before data", {kChecker, kBits}}},
      {{Mutation::kDrainForgetsHead, "drain forgets a frozen head", {kBits}}},
  };
  for (const Row& row : rows) {
    const Catchers catchers = row.find(row.mistake);
    print_row(row.mistake, catchers);
    for (const std::string& expected : row.mistake.expected)
      EXPECT_TRUE(catchers.names.contains(expected)) << row.mistake.name << " was not found by: " << expected;
    EXPECT_FALSE(catchers.names.empty()) << row.mistake.name << " was found by nothing";
  }
}

}  // namespace
}  // namespace tessera::etp
