// A rank that has joined the pair and leaves before it has registered its tensors: all ranks that wait for its
// registration, or for another rank's, are told so immediately.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "base/clock.h"
#include "tests/support/fixture.h"

namespace tessera::test {
namespace {

constexpr Timeout kRegistering = std::chrono::seconds(60);  // so that an error at half the hang limit is not its end

enum class Way { kKilled, kExits, kRaises, kKilledAsTheOthersGather };
std::string name_of(Way way) {
  constexpr const char* kNames[] = {"Killed", "Exits", "Raises", "KilledAsTheOthersGather"};
  return kNames[static_cast<size_t>(way)];
}

// Who leaves, who has joined as well and does not register before the others have been told, and how it leaves.
using Departures = testing::TestWithParam<std::tuple<const char*, const char*, Way>>;

class Departure : public Departures, protected TestJobs {
 protected:
  static int go(Way way) {
    if (way == Way::kExits) std::_Exit(0);
    if (way == Way::kRaises) throw std::runtime_error("of its own");
    return ::kill(::getpid(), SIGKILL);
  }
};

TEST_P(Departure, OfARankThatHasJoinedIsToldToAllWhoRegister) {
  const auto& [goes, late, way] = GetParam();
  const bool only = std::string(goes) == "inference/0";  // rank of its job
  std::vector<Side> sides{trainer(0), trainer(1), inference(0, only ? 1 : 2)};
  if (!only) sides.push_back(inference(1));
  const Signal joined, told;
  const Shared<std::atomic<int64_t>> gone_at;
  for (Side& side : sides) {
    side.rendezvous = kRegistering;
    if (way == Way::kKilledAsTheOthersGather) side.says = "the same";
    start(
        side, std::function<int(Pair&)>([&, others = sides.size() - 1, side](Pair& pair) {
          if (side.who() == goes) {
            for (size_t i = 0; i < others; ++i) joined.wait();
            *gone_at = Clock::steady().now().time_since_epoch().count();
            return go(way);
          }
          joined.raise();
          if (side.who() == late) {
            for (size_t i = 1; i < others; ++i) told.wait();
            return 0;
          }
          std::vector<float> tensor = local_tensor(side);
          REQUIRE_HERE(fails_with([&] { gather_and_register(pair, side, tensor.data()); }, ErrorCode::kPeerLost, goes));
          const Duration after = Clock::steady().now() - TimePoint(TimePoint::duration(gone_at->load()));
          std::fprintf(stderr, "told after %.2f s\n", to_seconds(after));
          told.raise();
          REQUIRE_HERE(after < hang_limit() / 2);
          return 0;
        }));
  }
  wait();
  for (const Side& side : sides) {
    if (side.who() == goes) continue;
    EXPECT_EQ(of(side.who()).status, 0) << side.who() << ": " << of(side.who()).output;
  }
}

std::string case_of(const testing::TestParamInfo<Departures::ParamType>& info) {
  const auto& [goes, late, way] = info.param;
  std::string name = std::string(goes) + name_of(way) + "And" + late + "IsLate";
  std::erase(name, '/');
  return name;
}

INSTANTIATE_TEST_SUITE_P(
    Joined, Departure,
    testing::Combine(testing::Values("trainer/0", "inference/1", "inference/0"), testing::Values("nobody", "trainer/1"),
                     testing::Values(Way::kKilled, Way::kExits, Way::kRaises, Way::kKilledAsTheOthersGather)),
    case_of);

}  // namespace
}  // namespace tessera::test
