#include "tools/bench/case.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <functional>
#include <numeric>

namespace tessera::bench {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

constexpr int64_t kBytes = int64_t{64} << 20;

std::vector<std::string> selected(const std::string& name) {
  std::vector<std::string> names;
  for (const Case& c : select_cases(all_cases(kBytes), [&](const Case& c) { return c.name == name; }))
    names.push_back((c.only_baseline ? "baseline " : "") + c.name);
  return names;
}

TEST(BenchCase, ABaselineRunsWithTheCaseThatIsComparedWithIt) {
  EXPECT_THAT(selected("10000x4KiB/private/digest"),
              ElementsAre("baseline rows-to-rows/8192/private/digest", "10000x4KiB/private/digest"));
  EXPECT_THAT(selected("rows-to-rows/8192/private"), ElementsAre("rows-to-rows/8192/private"));
  EXPECT_THAT(selected("no such case"), IsEmpty());
}

TEST(BenchCase, EveryBaselineIsACase) {
  const std::vector<Case> cases = all_cases(kBytes);
  for (const Case& c : cases) {
    if (!c.baseline.empty()) {
      EXPECT_EQ(std::ranges::count(cases, c.baseline, &Case::name), 1) << c.name;
    }
  }
}

TEST(BenchCase, SourcesOfLargeCasesHoldWhatWasAskedWhateverTheirDType) {
  for (const Case& c : all_cases(kBytes)) {
    const TensorGroup& group = c.groups.front();
    if (c.groups.size() == 1 && group.tensors == 1) {
      EXPECT_EQ(group.shape[0] * group.shape[1] * bits_of(group.src_dtype) / 8, kBytes) << c.name;
    }
  }
}

TEST(BenchCase, TheModelHasTheTensorsOfItsFile) {
  const std::vector<Case> cases = all_cases(kBytes);
  const auto model = std::ranges::find(cases, "MiniLM/shared/f32-bf16/digest", &Case::name);
  ASSERT_NE(model, cases.end());
  Index tensors = 0, floats = 0;
  for (const TensorGroup& group : model->groups) {
    const Index elements = std::accumulate(group.shape.begin(), group.shape.end(), Index{1}, std::multiplies<>());
    tensors += group.tensors;
    if (group.src_dtype == DType::kF32) floats += group.tensors * elements;
  }
  EXPECT_EQ(tensors, 104);
  EXPECT_EQ(floats, 22'713'216);
}

}  // namespace
}  // namespace tessera::bench
