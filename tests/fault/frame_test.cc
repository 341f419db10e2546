// One message between two ranks is left out, lost, doubled, delayed or changed. It can be any message, from any rank.
// The peers notice it, register again and go on with whole versions.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "base/mutation.h"
#include "bus/prepare/amax_messages.h"
#include "bus/session/versions.h"
#include "peer/exchange/messages.h"
#include "peer/handshake.h"
#include "tests/fault/drill.h"

namespace tessera::test {
namespace {

#ifdef TESSERA_SLOW_LANE
constexpr uint64_t kSeeds = 20;
constexpr size_t kEachInTurn = 1;  // tests one of so many messages with each fault
#else
constexpr uint64_t kSeeds = 1;
constexpr size_t kEachInTurn = 4;
#endif
constexpr int kSteps = 3;        // a fault shows within so many steps of all ranks
constexpr int kLongestWait = 4;  // the fault may hit a later message of the type

struct Message {
  uint16_t type = 0;
  std::string name;
  auto operator<=>(const Message&) const = default;
};

// All messages between two ranks, including any that are added to a conversation later.
std::vector<Message> all_messages() {
  std::vector<Message> all;
  const auto add = [&]<typename Said>() { all.push_back({kCode<Said>, std::string(kNameOf<Said::kType>)}); };
  HandshakeMessages::each(add);
  ExchangeMessages::each(add);
  bus::VersionMessages::each(add);
  bus::AmaxMessages::each(add);
  return all;
}

// Only ranks that refuse, give up, take long or are out of step send these, which need not happen here.
const std::set<std::string> kRarelySaid{"Reject", "Closed",  "Broken",   "Withdraw", "Refuse",
                                        "Revoke", "Release", "Progress", "Ahead"};

bool is_rare(const Message& message, Mode mode) {
  return kRarelySaid.contains(message.name) || (mode == Mode::kInPlace && message.name == "Decided");
}

constexpr std::array kFaults{FrameFault::kUnsaid, FrameFault::kLost, FrameFault::kDoubled, FrameFault::kDelayed,
                             FrameFault::kChanged};
constexpr const char* kNames[] = {"None", "LeftOut", "Lost", "Doubled", "Delayed", "Changed"};

// Answers that a peer sends on its own, and after which it sends nothing that would be out of turn.
const std::set<uint16_t> kAnswers{kCode<Prepare>, kCode<bus::Held>, kCode<bus::Grant>};

DrillPlan plan_of(Mode mode) {
  std::mt19937_64 random(7);
  DrillPlan plan;
  plan.senders = plan.receivers = 2;
  plan.bulk_src = "2:S0";
  plan.bulk_dst = "2:S1";
  plan.sender.mode = plan.receiver.mode = mode;
  do plan.cases = {random_case(random, "partial", plan.senders, plan.receivers)};
  while (!plan.cases.front().src.has_partial());
  plan.cases.push_back(random_wire_case(random, "quantised", plan.senders, plan.receivers, Format::kNvfp4));
  return plan;
}

class FrameDrill {
 public:
  explicit FrameDrill(Mode mode) : plan_(plan_of(mode)) {
    std::thread([] {}).join();  // see kill_test.cc
    board_->step = 1;
    const std::string store = group_.start_store();
    for (Rank rank = 0; rank < 2; ++rank)
      for (const bool sends : {true, false})
        group_.start(fmt::format("{}/{}", sends ? "trainer" : "inference", rank), [this, rank, sends, store] {
          frame_faults() = &*faults_;
          return (sends ? run_sender : run_receiver)(plan_, *board_, store, rank);
        });
    advance("the beginning");
  }

  // Makes the fault on that message, or a later one of its type, whoever sends it first. Returns whether a rank has.
  bool make(const Message& message, FrameFault fault, uint64_t seed) {
    std::mt19937_64 random(seed);
    faults_->type = message.type;
    faults_->skip = static_cast<int>(random() % kLongestWait);
    faults_->place = static_cast<uint32_t>(random());
    const std::string what = fmt::format("{} {}, seed {}", message.name, kNames[static_cast<size_t>(fault)], seed);
    faults_->fault = fault;
    advance(what);
    const bool beats = message.type == kCode<Ping> || message.type == kCode<Pong>;  // needs a connection that lasts
    const bool rare = is_rare(message, plan_.sender.mode);
    const int tries = rare ? kLongestWait : beats ? 2000 : 30 * kLongestWait;
    for (int i = 0; i < tries && faults_->fault != FrameFault::kNone && !testing::Test::HasFailure(); ++i) {
      if (i % kLongestWait == 0 && !beats) ++board_->renewals;  // for messages that ranks send as they register
      advance(what);
    }
    return faults_->fault.exchange(FrameFault::kNone) == FrameFault::kNone;
  }

  void finish() {
    board_->stop = true;
    board_->changed();
    for (const Outcome& outcome : group_.wait(3 * hang_limit()))
      EXPECT_EQ(outcome.status, 0) << outcome.name << ": " << outcome.output;
    EXPECT_THAT(group_.left_over(), testing::IsEmpty());
    std::printf("%d versions; the slowest took %.2f s: %s\n", static_cast<int>(board_->step), slowest_,
                slowest_at_.c_str());
  }

 private:
  // Waits until all ranks have completed some more steps.
  void advance(const std::string& what) {
    const TimePoint start = Clock::steady().now();
    const int64_t until = board_->step + kSteps;
    const auto done = [&](const RankBoard& one) { return one.good >= until; };
    const auto all = [&](const auto& ranks) { return std::all_of(ranks.begin(), ranks.begin() + 2, done); };
    const bool went_on =
        board_->await([&] { return board_->failed || (all(board_->senders) && all(board_->receivers)); },
                      Deadline::after(3 * hang_limit()));
    const double took = to_seconds(Clock::steady().now() - start);
    if (took > slowest_) slowest_at_ = what;
    slowest_ = std::max(slowest_, took);
    if (went_on && !board_->failed) return;
    std::string state;
    for (const auto* ranks : {&board_->senders, &board_->receivers})
      for (Rank rank = 0; rank < 2; ++rank)
        state += fmt::format(" good {}, losses {};", (*ranks)[static_cast<size_t>(rank)].good.load(),
                             (*ranks)[static_cast<size_t>(rank)].losses.load());
    ADD_FAILURE() << what << ": no whole transfer at all ranks within " << took << " s, from step " << until - kSteps
                  << " on:" << state;
  }

  const DrillPlan plan_;
  const Shared<Board> board_;
  const Shared<FrameFaults> faults_;
  ProcessGroup group_;
  double slowest_ = 0;
  std::string slowest_at_;
};

class Frames : public testing::TestWithParam<std::tuple<Mode, FrameFault>> {};

TEST_P(Frames, OfAnyMessageAndTheTransfersGoOn) {
  const auto [mode, fault] = GetParam();
  FrameDrill drill(mode);
  size_t turn = static_cast<size_t>(mode) + static_cast<size_t>(fault);
  for (const Message& message : all_messages()) {
    const bool its_turn = kEachInTurn == 1 || ++turn % kEachInTurn == 0;
    if (fault == FrameFault::kUnsaid ? !kAnswers.contains(message.type) : !its_turn) continue;
    bool said = false;
    for (uint64_t seed = 0; seed < kSeeds && !HasFailure(); ++seed)
      said = drill.make(message, fault, turn + seed) || said;
    if (HasFailure()) break;
    EXPECT_TRUE(said || is_rare(message, mode)) << message.name << " was never said";
  }
  drill.finish();
}

std::string name_of(const testing::TestParamInfo<std::tuple<Mode, FrameFault>>& info) {
  const auto [mode, fault] = info.param;
  return fmt::format("{}{}", mode == Mode::kStaged ? "Staged" : "InPlace", kNames[static_cast<size_t>(fault)]);
}
INSTANTIATE_TEST_SUITE_P(Are, Frames,
                         testing::Combine(testing::Values(Mode::kInPlace, Mode::kStaged), testing::ValuesIn(kFaults)),
                         name_of);

}  // namespace
}  // namespace tessera::test
