#include "bus/registration/wait_hints.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "bus/registration/records.h"
#include "store/test_util.h"

namespace tessera::bus {
namespace {

// The wait of trainer/0 of 1, unless it says otherwise.
class WaitHint : public testing::Test {
 protected:
  void join(const std::string& pair, const std::string& job, std::vector<std::string> peers, Rank rank = 0,
            int world = 1) {
    store_->put(pair_key("test", pair, job, rank),
                write_record(PairRecord{.rank = {.incarnation = process_of(job, rank),
                                                 .world = world,
                                                 .address = "/nowhere",
                                                 .release = "test",
                                                 .worker = {}},
                                        .peers = std::move(peers)}));
  }
  void publish(const std::string& pair, const std::string& batch, const std::string& job, const std::string& other,
               Rank rank = 0, bool registered = true) {
    const std::string meeting = meeting_prefix("test", pair, batch, job, other);
    const Registration of{process_of(job, rank), 1};
    if (registered)
      store_->put(batch_key(meeting, job, rank),
                  write_record(BatchRecord{.of = of, .hash = std::string(16, 'h'), .diff = {}}));
    else
      store_->put(gathered_key(meeting, job, rank), write_record(GatheredRecord{.of = of, .value = {}}));
  }
  std::string of_join(const std::string& pair, const std::string& job, const Identity& self = kSelf) {
    return wait_hint(*store_, self, {{.pair = pair, .job = job}}, kLimit);
  }
  std::string of_batch(const std::string& pair, const std::string& batch, const std::string& job,
                       std::vector<Rank> ranks = {0}, const Identity& self = kSelf) {
    return wait_hint(*store_, self, {{.pair = pair, .batch = batch, .job = job, .ranks = std::move(ranks)}}, kLimit);
  }

  static constexpr auto kLimit = store::kLimit;
  static inline const Identity kSelf{.name_space = "test", .job = "trainer", .rank = 0, .world = 1};
  const std::unique_ptr<store::Server> server_ = store::tcp_server();
  const std::unique_ptr<Store> store_ = open_store(server_->address());

 private:
  Incarnation process_of(const std::string& job, Rank rank) {
    return processes_.try_emplace(rank_name(job, rank), Incarnation::next()).first->second;
  }
  std::map<std::string, Incarnation> processes_;
};

TEST_F(WaitHint, IsEmptyIfNobodyIsElsewhere) {
  EXPECT_EQ(of_join("weights", "engine"), "");
  join("weights", "trainer", {"engine"});
  EXPECT_EQ(of_join("weights", "engine"), "");
  join("weights", "engine", {"trainer"});
  EXPECT_EQ(of_join("weights", "engine"), "") << "all are there";
  EXPECT_EQ(of_batch("weights", "policy", "engine"), "");
  publish("weights", "policy", "trainer", "engine");
  publish("weights", "other", "trainer", "engine");
  EXPECT_EQ(of_batch("weights", "policy", "engine"), "") << "nobody else has registered the other batch";
}

TEST_F(WaitHint, NamesThePairOfAJobThatHasJoinedAnother) {
  join("weights", "trainer", {"engine"});
  join("wieghts", "engine", {"trainer"}, 0, 2);
  join("wieghts", "engine", {"trainer"}, 1, 2);
  EXPECT_EQ(of_join("weights", "engine"), "job engine is here, in pair wieghts");
  join("weights", "engine", {"trainer"}, 0, 2);
  EXPECT_EQ(of_join("weights", "engine"), "engine/1 is here, in pair wieghts");
}

TEST_F(WaitHint, NamesThePairOfARankOfTheOwnJob) {
  join("weights", "trainer", {"engine"}, 0, 3);
  join("wieghts", "trainer", {"engine"}, 1, 3);
  join("wieghts", "trainer", {"engine"}, 2, 3);
  EXPECT_EQ(of_join("weights", "trainer"), "trainer/1-2 are here, in pair wieghts");
}

TEST_F(WaitHint, NamesTheThirdJobThatAJobWaitsFor) {
  join("weights", "trainer", {"engine"});
  join("scores", "engine", {"judge"});
  EXPECT_EQ(of_join("weights", "engine"), "job engine is here, in pair scores with job judge, which is missing there");
  join("scores", "judge", {"engine"});
  EXPECT_EQ(of_join("weights", "engine"), "job engine is here, in pair scores with job judge");
}

TEST_F(WaitHint, AsksWhetherAJobThatWaitsIsTheOneThatIsMeant) {
  join("weights", "trainer", {"engin"});
  join("weights", "engine", {"trainer"});
  EXPECT_EQ(of_join("weights", "engin"), "job engine is here and waits for job trainer: is engin meant to be engine?");
  const Identity engine{.name_space = "test", .job = "engine", .rank = 0, .world = 1};
  EXPECT_EQ(of_batch("weights", "policy", "trainer", {0}, engine),
            "trainer/0 waits for job engin, not for engine: is engin meant to be engine?");
}

TEST_F(WaitHint, NamesAJobOfThePairThatWaitsForAnotherName) {
  join("weights", "trainer", {"engine"});
  join("weights", "inference", {"learner"});
  EXPECT_EQ(of_join("weights", "engine"), "job inference is here and waits for job learner");
}

TEST_F(WaitHint, DoesNotTakeAnExpectedJobForTheMissingOne) {
  join("weights", "trainer", {"engine0", "engine1"});
  join("weights", "engine0", {"trainer"});
  EXPECT_EQ(of_join("weights", "engine1"), "");
}

TEST_F(WaitHint, NamesTheBatchThatIsRegisteredInstead) {
  join("weights", "trainer", {"engine"});
  for (const Rank rank : {0, 1}) join("weights", "engine", {"trainer"}, rank, 2);
  publish("weights", "polcy", "engine", "trainer", 0);
  publish("weights", "polcy", "engine", "trainer", 1, false);
  EXPECT_EQ(of_batch("weights", "policy", "engine", {0, 1}),
            "engine/0-1 have registered batch polcy of this pair, not policy");
  EXPECT_EQ(of_batch("weights", "policy", "engine", {1}),
            "engine/1 has registered batch polcy of this pair, not policy");
  publish("weights", "polcy", "trainer", "engine");
  EXPECT_EQ(of_batch("weights", "policy", "engine", {1}), "") << "this rank has it, too";
}

TEST_F(WaitHint, NamesTheBatchOfAnotherPairThatIsRegisteredFirst) {
  for (const std::string pair : {"weights", "samples"}) {
    join(pair, "trainer", {"engine"});
    join(pair, "engine", {"trainer"});
  }
  publish("samples", "texts", "engine", "trainer");
  EXPECT_EQ(of_batch("weights", "policy", "engine"),
            "engine/0 has registered batch texts of pair samples, and waits for trainer/0 there");
}

TEST_F(WaitHint, NamesThePairThatThisRankHasYetToJoin) {
  join("weights", "trainer", {"engine"});
  join("weights", "engine", {"trainer"});
  join("samples", "engine", {"trainer"});
  EXPECT_EQ(of_batch("weights", "policy", "engine"), "engine/0 waits for trainer/0 in pair samples");
}

TEST_F(WaitHint, NamesTheThirdJobThatHasNotRegistered) {
  for (const std::string job : {"engine", "judge"}) join("weights", job, {"judge", "trainer"});
  join("weights", "trainer", {"engine"});
  publish("weights", "scores", "engine", "judge");
  EXPECT_EQ(of_batch("weights", "policy", "engine"),
            "engine/0 has registered batch scores of this pair with job judge, which has not");
  publish("weights", "scores", "judge", "engine");
  EXPECT_EQ(of_batch("weights", "policy", "engine"), "engine/0 has registered batch scores of this pair, not policy");
}

TEST_F(WaitHint, NamesTheBatchOfASenderThatRegistersItWithOtherJobs) {
  join("weights", "trainer", {"engine0", "engine1"});
  for (const std::string job : {"engine0", "engine1"}) join("weights", job, {"trainer"});
  publish("weights", "policy", "trainer", "engine0");
  publish("weights", "policy", "engine0", "trainer");
  publish("weights", "polcy", "engine1", "trainer");
  const Identity engine1{.name_space = "test", .job = "engine1", .rank = 0, .world = 1};
  EXPECT_EQ(of_batch("weights", "polcy", "trainer", {0}, engine1),
            "trainer/0 has registered batch policy of this pair, not polcy");
  publish("weights", "policy", "engine1", "trainer");
  EXPECT_EQ(of_batch("weights", "polcy", "trainer", {0}, engine1), "") << "this rank has it, too";
}

TEST_F(WaitHint, IsEmptyForARankThatHasLeft) {
  join("weights", "trainer", {"engine"});
  EXPECT_EQ(of_batch("weights", "policy", "engine"), "");
}

TEST_F(WaitHint, LeavesOutWhatNoProcessWrites) {
  join("weights", "trainer", {"engine"});
  join("weights", "engine", {"trainer"});
  for (const std::string key :
       {"a\x1b[31m/engine/0", "wieghts/engine/-1", "wieghts/engine/x", "wieghts/\xff/0", "wieghts/engine", "", "//"})
    store_->put("test/pair/" + key, "nonsense");
  join("w\n", "engine", {"trainer"}, 0);
  join("wieghts", "engine", {"trainer\n"}, 0);
  for (const std::string key : {"\n/engine+trainer/engine/rank/0", "x/engine/engine/rank/0", "x/+/engine/rank/0",
                                "x/engine+trainer/engine/rank/9999999999", "x/engine+trainer/engine/rank/0"})
    store_->put("test/batch/weights/" + key, "nonsense");
  EXPECT_EQ(of_batch("weights", "policy", "engine"), "");
  EXPECT_EQ(of_join("weights", "judge"), "");
}

TEST_F(WaitHint, NamesAFewOfMany) {
  join("weights", "trainer", {"engine"});
  for (int i = 0; i < 5; ++i) join(fmt::format("pair{}", i), "engine", {"trainer"});
  EXPECT_EQ(of_join("weights", "engine"), "job engine is here, in pairs pair0, pair1, pair2 and 2 more");
}

TEST_F(WaitHint, IsEmptyIfTheStoreHasGone) {
  join("weights", "trainer", {"engine"});
  join("wieghts", "engine", {"trainer"});
  store_->close();
  EXPECT_EQ(of_join("weights", "engine"), "");
}

}  // namespace
}  // namespace tessera::bus
