// Ranks and jobs that leave and come back while others stay: nobody else is restarted, and the next transfers are
// correct.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include "tests/support/fixture.h"

namespace tessera::test {
namespace {

constexpr int64_t kSteps = 200;
constexpr int64_t kTurn = 10;

class Return : public JobsTest {
 protected:
  // A rank of the trainer: one version in each step, whoever is there, until one was sent in session `sessions`.
  void train(const Side& side, int64_t sessions, int64_t first_step = 1) {
    start(side, [=](Batch& batch, std::vector<float>& tensor) {
      for (int64_t step = first_step; step < kSteps; ++step) {
        fill(side, tensor, step);
        if (!went_well([&] { batch.send(step, kAttempt).wait(); }))
          step = step / kTurn * kTurn + kTurn - 1;  // the ranks go on with the same one
        else if (batch.stats().sessions >= sessions)
          return 0;
      }
      return 6;
    });
  }
  // A receiving rank: takes and checks what comes, until a version came in session `sessions`.
  void infer(const Side& side, int64_t sessions) {
    start(side, [=](Batch& batch, std::vector<float>& tensor) {
      for (int64_t step = 1; step < kSteps; ++step) {
        if (!went_well([&] { batch.recv({}, kAttempt).wait(); })) continue;
        REQUIRE_HERE(!batch.torn() && holds(side, tensor, batch.version()));
        if (batch.stats().sessions >= sessions) return 0;
      }
      return 6;
    });
  }
  // Takes or sends one version, and dies.
  pid_t visit_and_die(const Side& side) {
    return dying_.emplace_back(start(side, [=](Batch& batch, std::vector<float>& tensor) {
      if (side.sends) fill(side, tensor, 1);
      (side.sends ? batch.send(1, kPatience) : batch.recv({}, kPatience)).wait();
      return ::kill(::getpid(), SIGKILL);
    }));
  }
  pid_t start(const Side& side, const Body& body) {
    return JobsTest::start(side.who() + (after_.empty() ? "" : ", again"), [=, this, after = after_] {
      for (const pid_t pid : after) await_end(pid);
      return with_batch(side, store_, body);
    });
  }
  // Everything started from now on begins once these have ended.
  void after(std::vector<pid_t> pids) { after_ = std::move(pids); }

  void expect_success() {
    for (const pid_t pid : dying_) EXPECT_EQ(of(pid).status, -SIGKILL) << of(pid).name << ": " << of(pid).output;
    expect_all_well(3 * hang_limit());
  }

  std::vector<pid_t> after_;
  std::vector<pid_t> dying_;
};

TEST_F(Return, AReceivingRank) {
  for (const Rank rank : {0, 1}) train(trainer(rank), 2);
  infer(inference(0), 2);
  after({visit_and_die(inference(1))});
  infer(inference(1), 1);
  expect_success();
}

TEST_F(Return, TheReceivingRankThatChooses) {
  for (const Rank rank : {0, 1}) train(trainer(rank), 2);
  infer(inference(1), 2);
  after({visit_and_die(inference(0))});
  infer(inference(0), 1);
  expect_success();
}

TEST_F(Return, ASendingRank) {
  train(trainer(0), 2);
  for (const Rank rank : {0, 1}) infer(inference(rank), 2);
  after({visit_and_die(trainer(1))});
  train(trainer(1), 1, kTurn);
  expect_success();
}

Side saying(Side side, const std::string& words) {
  side.says = words;
  return side;
}

// They report it once; every rank that comes back learns of it.
TEST_F(Return, ARankHearsWhatItsOwnRanksHaveSaid) {
  const auto sender = [](Rank rank) { return saying(trainer(rank), "sender "); };
  const auto receiver = [](Rank rank) { return saying(inference(rank), "receiver "); };
  train(sender(0), 2);
  infer(receiver(0), 2);
  after({visit_and_die(sender(1)), visit_and_die(receiver(1))});
  train(sender(1), 1, kTurn);
  infer(receiver(1), 1);
  expect_success();
}

TEST_F(Return, AReceivingJobOfAnotherWorldAndLayout) {
  for (const Rank rank : {0, 1}) train(trainer(rank), 2);
  after({visit_and_die(inference(0)), visit_and_die(inference(1))});
  for (const Rank rank : {0, 1, 2}) infer(inference(rank, 3), 1);
  expect_success();
}

TEST_F(Return, ASendingJobOfAnotherWorldWhoseVersionsBeginAgain) {
  for (const Rank rank : {0, 1}) infer(inference(rank), 2);
  after({visit_and_die(trainer(0)), visit_and_die(trainer(1))});
  for (const Rank rank : {0, 1, 2}) train(trainer(rank, 3), 1);
  expect_success();
}

// What a job comes back as, and what the ranks that have pinned the first one say.
struct Comeback {
  const char* name;
  int world;
  std::string layout;
  std::string refusal;
};
class Pinned : public Return, public testing::WithParamInterface<Comeback> {};

TEST_P(Pinned, RefusesAJobThatComesBackOtherwise) {
  Side pinned = trainer(0, 1);
  pinned.options.pinned = true;
  const Signal refused;
  start(pinned, [&](Batch& batch, std::vector<float>& tensor) {
    fill(pinned, tensor, 1);
    batch.send(1, kPatience).wait();
    std::string error;
    for (int64_t version = 2; version < 50 && error.find("pinned") == std::string::npos; ++version) {
      try {
        batch.send(version, std::chrono::milliseconds(200)).wait();
      } catch (const Error& e) {
        error = e.what();
      }
    }
    std::fprintf(stderr, "%s\n", error.c_str());
    REQUIRE_HERE(error.find(GetParam().refusal) != std::string::npos);
    for (int i = 0; i < GetParam().world; ++i) refused.raise();
    return 0;
  });
  after({visit_and_die(inference(0, 1))});
  for (Rank rank = 0; rank < GetParam().world; ++rank) {
    Side side = inference(rank, GetParam().world);
    side.layout = GetParam().layout;
    side.rendezvous = std::chrono::seconds(4);
    JobsTest::start("again", [=, this, &refused, after = after_] {
      for (const pid_t pid : after) await_end(pid);
      try {
        return with_batch(side, store_, [&](Batch&, std::vector<float>&) {
          refused.wait();
          return 6;
        });
      } catch (const Error&) {
        return 0;  // nobody attaches to it
      }
    });
  }
  expect_success();
}

INSTANTIATE_TEST_SUITE_P(, Pinned,
                         testing::Values(Comeback{"AnotherWorld", 2, "2:S1", "comes back with 2 ranks, not 1"},
                                         Comeback{"AnotherMesh", 1, "a=1,b=1:S1,R",
                                                  "comes back with tensor weight laid out"},
                                         Comeback{"AnotherLayout", 1, "1:R", "comes back with tensor weight laid out"}),
                         [](const auto& comeback) { return comeback.param.name; });

// Other jobs take versions when they like; the job that was named first is there all the time.
TEST_F(Return, OtherJobsThatComeAndGo) {
  const Signal joined;
  for (const Rank rank : {0, 1})
    start(trainer(rank), [&](Batch& batch, std::vector<float>& tensor) {
      const Side side = trainer(rank);
      for (int64_t step = 1; step < kSteps; ++step) {
        fill(side, tensor, step);
        batch.send(step, kPatience).wait();
        if (step == 3) joined.wait();  // that many times as there are trainers
      }
      return 0;
    });
  for (const Rank rank : {0, 1})
    start(inference(rank), [&](Batch& batch, std::vector<float>& tensor) {
      while (batch.version() < kSteps - 1) {
        batch.recv({}, kPatience).wait();
        REQUIRE_HERE(holds(inference(rank), tensor, batch.version()));
      }
      return 0;
    });
  Side other{.job = "evaluation", .peer = "trainer", .rank = 0, .world = 1, .layout = "1:R"};
  start(other, [&](Batch& batch, std::vector<float>& tensor) {
    for (int i = 0; i < 2; ++i) joined.raise();
    for (int i = 0; i < 5; ++i) {
      batch.recv({}, kPatience).wait();
      REQUIRE_HERE(holds(other, tensor, batch.version()));
    }
    return 0;  // while the others go on
  });
  expect_success();
}

// The trainer's ranks come back one at a time and both together, while the others already offer or wait; staged, the
// receivers, too.
class Moved : public Return, public testing::WithParamInterface<Mode> {
 protected:
  static constexpr int64_t kVersions = 6;
  static bool moves(Rank rank, int64_t step) { return step == 2 + rank || step == 5; }

  // Two places for a tensor, in turn.
  class Places {
   public:
    Places(Side side, std::vector<float>& registered)
        : side_(std::move(side)), other_(registered.size()), now_(&registered), then_(&other_) {}
    void move(Batch& batch) {
      std::swap(now_, then_);
      *now_ = *then_;
      std::ranges::fill(*then_, -1.0F);
      const TensorSpec spec = spec_of(side_, now_->data());
      batch.relocate({&spec, 1});
    }
    std::vector<float>& now() { return *now_; }

   private:
    const Side side_;
    std::vector<float> other_;
    std::vector<float>* now_;
    std::vector<float>* then_;
  };
};

TEST_P(Moved, TensorsAreMetAnewWhereTheyAre) {
  const bool staged = GetParam() == Mode::kStaged;
  const Signal taken;
  for (const Rank rank : {0, 1}) {
    Side side = trainer(rank);
    side.options.mode = GetParam();
    start(side, [=, &taken](Batch& batch, std::vector<float>& tensor) {
      Places places(side, tensor);
      for (int64_t step = 1; step <= kVersions; ++step) {
        if (moves(rank, step)) places.move(batch);
        fill(side, places.now(), step);
        batch.send(step, kPatience).wait();
      }
      taken.wait();
      batch.close();
      return 0;
    });
  }
  for (const Rank rank : {0, 1}) {
    Side side = inference(rank);
    side.options.mode = GetParam();
    start(side, [=, &taken](Batch& batch, std::vector<float>& tensor) {
      Places places(side, tensor);
      for (int64_t step = 1; batch.version() < kVersions; ++step) {
        if (staged && moves(rank, step)) places.move(batch);
        batch.recv({}, kPatience).wait();
        REQUIRE_HERE(!batch.torn() && holds(side, places.now(), batch.version()));
      }
      REQUIRE_HERE(staged ? batch.stats().sessions == 1 : batch.stats().sessions > 3);
      taken.raise();
      batch.close();
      return 0;
    });
  }
  expect_success();
}

INSTANTIATE_TEST_SUITE_P(Mode, Moved, testing::Values(Mode::kInPlace, Mode::kStaged), [](const auto& mode) {
  return std::string(mode.param == Mode::kStaged ? "Staged" : "InPlace");
});

TEST_F(Return, WhatCannotBeMovedSaysSo) {
  train(trainer(0, 1), 1);
  const Side side{.job = "inference", .peer = "trainer", .rank = 0, .world = 1, .layout = "1:R"};
  start(side, [=](Batch& batch, std::vector<float>& tensor) {
    const TensorSpec spec = spec_of(side, tensor.data());
    REQUIRE_HERE(fails_with([&] { batch.relocate({&spec, 1}); }, ErrorCode::kUnimplemented, "accepts it in place"));
    batch.recv({}, kPatience).wait();
    return 0;
  });
  expect_success();
}

}  // namespace
}  // namespace tessera::test
