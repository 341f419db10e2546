// A rank that waits for others says so, and names them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/jobs.h"

namespace tessera::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(Reminder, EveryTenSecondsWhoIsMissingIsNamed) {
  ProcessGroup group;
  const std::string store = group.start_store();
  Side side = trainer(0, 1);
  side.rendezvous = std::chrono::seconds(22);
  group.start("trainer/0", [&] { return with_pair(side, store, [](Pair&) { return 0; }); });
  const std::vector<Outcome> outcomes = group.wait(std::chrono::seconds(60));
  ASSERT_EQ(outcomes.size(), 1U);
  EXPECT_EQ(outcomes[0].status, kDeadline);
  EXPECT_THAT(outcomes[0].output, AllOf(HasSubstr("ranks.awaited"), HasSubstr("trainer/0 has waited 10 s, missing: "),
                                        HasSubstr("trainer/0 has waited 20 s, missing: "), HasSubstr("inference")));
}

}  // namespace
}  // namespace tessera::test
