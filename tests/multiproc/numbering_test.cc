// Sends by default numbers: the ranks of a job must come to offer the same one, also after a rank was replaced and
// sends have failed on some ranks only.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/fixture.h"

namespace tessera::test {
namespace {

using std::chrono::milliseconds;

int die() {
  return ::kill(::getpid(), SIGKILL);
}

// A send that fails only on this rank, which has counted it.
bool is_given_up(Handle& sent) {
  if (!sent.cancel()) return false;
  return fails_with([&] { sent.wait(); }, ErrorCode::kCancelled, "");
}

enum class Order : uint8_t { kBehindFirst, kAheadFirst };  // which of the two ranks sends first then

class Numbering : public JobsTest {
 protected:
  // Trainer 1 dies after a first version. When it is back, trainer 0 has a send under way that it did not know of as
  // they met, and gives that up; so what it sends next is one more than trainer 1 counts.
  void come_back_one_behind(const std::function<Side(Rank rank)>& sender, Order order);
};

void Numbering::come_back_one_behind(const std::function<Side(Rank rank)>& sender, Order order) {
  const Side receiver = inference(0, 1);
  if (!sender(0).agent.empty())
    for (const Rank rank : {0, 1}) start_agent(sender(rank));
  const float terms = sender(0).layout == "2:Psum" ? 2 : 1;  // equal ones
  const Signal sent_first, waits, back, given_up, follows;
  Barrier over;
  start(sender(0), [&](Batch& batch, std::vector<float>& tensor) {
    fill(sender(0), tensor, 1);
    batch.send({}, kPatience).wait();
    sent_first.raise();
    went_well([&] { batch.send({}, kAttempt).wait(); });  // its own rank dies
    {
      Handle sent = batch.send({}, kPatience);
      waits.raise();
      back.wait();
      REQUIRE_HERE(is_given_up(sent));
    }
    fill(sender(0), tensor, 9);
    given_up.raise();
    if (order == Order::kBehindFirst) follows.wait();
    Handle sent = batch.send({}, kPatience);
    if (order == Order::kAheadFirst) follows.raise();
    sent.wait();
    over.pass();
    return 0;
  });
  const pid_t dying = start(sender(1), [&](Batch& batch, std::vector<float>& tensor) {
    fill(sender(1), tensor, 1);
    batch.send({}, kPatience).wait();
    sent_first.wait();
    return die();
  });
  start(receiver, [&](Batch& batch, std::vector<float>& tensor) {
    while (batch.version() < 2) went_well([&] { batch.recv({}, kAttempt).wait(); });
    for (float& element : tensor) element /= terms;
    REQUIRE_HERE(holds(receiver, tensor, 9));
    over.pass();
    return 0;
  });
  start("trainer/1, again", [&, dying] {
    await_end(dying);
    waits.wait();
    return with_batch(sender(1), store_, [&](Batch& batch, std::vector<float>& tensor) {
      back.raise();
      given_up.wait();
      fill(sender(1), tensor, 9);
      if (order == Order::kAheadFirst) follows.wait();
      Handle sent = batch.send({}, kPatience);
      if (order == Order::kBehindFirst) follows.raise();
      sent.wait();
      over.pass();
      return 0;
    });
  });
  over.open();
  EXPECT_EQ(of(dying).status, -SIGKILL);
  expect_all_well();
}

TEST_F(Numbering, ASendingRankComesBackAmongSendsThatFail) {
  come_back_one_behind([](Rank rank) { return trainer(rank); }, Order::kBehindFirst);
}

TEST_F(Numbering, ASendingRankComesBackAmongSendsThatFailAndIsLate) {
  come_back_one_behind([](Rank rank) { return trainer(rank); }, Order::kAheadFirst);
}

TEST_F(Numbering, ASendingRankComesBackBehindAnAgent) {
  come_back_one_behind([](Rank rank) { return with_agent(trainer(rank)); }, Order::kBehindFirst);
}

// The reductions are between own ranks, before anything is offered.
Side with_terms(Rank rank) {
  Side side = trainer(rank);
  side.layout = "2:Psum";
  return side;
}

TEST_F(Numbering, ASendingRankWithTermsComesBackAmongSendsThatFail) {
  come_back_one_behind(with_terms, Order::kBehindFirst);
}

TEST_F(Numbering, ASendingRankWithTermsComesBackAmongSendsThatFailAndIsLate) {
  come_back_one_behind(with_terms, Order::kAheadFirst);
}

// A staged send does not wait for the others: those that had gone on before the rank's first send would be ahead for
// good, and what they keep would never be whole.
TEST_F(Numbering, AStagedRankComesBackWhileTheOthersSend) {
  constexpr int kMore = 5;  // more than there are snapshots
  const Signal attached, waits, back, ahead;
  Barrier over;
  start(staged(trainer(0)), [&](Batch& batch, std::vector<float>& tensor) {
    attached.raise();
    batch.send({}, kPatience).wait();
    waits.raise();
    back.wait();
    fill(trainer(0), tensor, 9);
    for (int i = 0; i < kMore; ++i) batch.send({}, kPatience).wait();
    ahead.raise();
    over.pass();
    return 0;
  });
  const pid_t dying = start(staged(trainer(1)), [&](Batch& batch, std::vector<float>&) {
    batch.send({}, kPatience).wait();
    for (int others = 2; others > 0; --others) attached.wait();
    return die();
  });
  start(inference(0, 1), [&](Batch& batch, std::vector<float>& tensor) {
    attached.raise();
    while (batch.version() < 2) went_well([&] { batch.recv(2, kAttempt).wait(); });
    REQUIRE_HERE(holds(inference(0, 1), tensor, 9));
    over.pass();
    return 0;
  });
  start("trainer/1, again", [&, dying] {
    await_end(dying);
    waits.wait();
    return with_batch(staged(trainer(1)), store_, [&](Batch& batch, std::vector<float>& tensor) {
      back.raise();
      ahead.wait();
      fill(trainer(1), tensor, 9);
      bool taken = false;
      for (int i = 0; i < 100 && !taken; ++i) {  // the first one may come before it is told
        const int64_t version = batch.send({}, kPatience).wait();
        taken = went_well([&] { batch.wait_peers(1, version, milliseconds(300)); });
      }
      REQUIRE_HERE(taken);
      over.pass();
      return 0;
    });
  });
  over.open();
  EXPECT_EQ(of(dying).status, -SIGKILL);
  expect_all_well();
}

// A rank that has counted all along may hold what belongs to the send that the other one has given up: it does not
// offer that as what the other sends now.
TEST_F(Numbering, ASendThatOthersHaveGivenUpFailsAtOnce) {
  const Signal went_on;
  Barrier over;
  start(trainer(0), [&](Batch& batch, std::vector<float>& tensor) {
    batch.send({}, kPatience).wait();
    {
      Handle sent = batch.send({}, kPatience);
      REQUIRE_HERE(is_given_up(sent));
    }
    fill(trainer(0), tensor, 3);
    Handle sent = batch.send({}, 2 * kPatience);
    went_on.raise();
    REQUIRE_HERE(sent.wait() == 3);
    over.pass();
    return 0;
  });
  start(trainer(1), [&](Batch& batch, std::vector<float>& tensor) {
    batch.send({}, kPatience).wait();
    went_on.wait();
    fill(trainer(1), tensor, 2);
    REQUIRE_HERE(fails_with([&] { batch.send({}, std::chrono::hours(1)).wait(); }, ErrorCode::kDeadlineExceeded,
                            "other ranks of job trainer offer version 3 by now"));
    fill(trainer(1), tensor, 3);
    REQUIRE_HERE(batch.send({}, kPatience).wait() == 3);
    over.pass();
    return 0;
  });
  start(inference(0, 1), [&](Batch& batch, std::vector<float>& tensor) {
    while (batch.version() < 3) went_well([&] { batch.recv({}, kAttempt).wait(); });
    REQUIRE_HERE(holds(inference(0, 1), tensor, 3));
    over.pass();
    return 0;
  });
  over.open();
  expect_all_well();
}

// Numbers that are given stay.
TEST_F(Numbering, ANumberThatIsGivenWaitsForTheOthers) {
  const Signal went_on, goes_back;
  Barrier over;
  start(trainer(0), [&](Batch& batch, std::vector<float>& tensor) {
    batch.send(1, kPatience).wait();
    {
      Handle sent = batch.send(7, kPatience);
      went_on.raise();
      goes_back.wait();
      REQUIRE_HERE(is_given_up(sent));
    }
    fill(trainer(0), tensor, 5);
    REQUIRE_HERE(batch.send(5, kPatience).wait() == 5);
    over.pass();
    return 0;
  });
  start(trainer(1), [&](Batch& batch, std::vector<float>& tensor) {
    batch.send(1, kPatience).wait();
    went_on.wait();
    fill(trainer(1), tensor, 5);
    Handle sent = batch.send(5, kPatience);
    REQUIRE_HERE(!sent.wait_for(milliseconds(200)));
    goes_back.raise();
    REQUIRE_HERE(sent.wait() == 5);
    over.pass();
    return 0;
  });
  start(inference(0, 1), [&](Batch& batch, std::vector<float>& tensor) {
    while (batch.version() < 5) batch.recv({}, kPatience).wait();
    REQUIRE_HERE(holds(inference(0, 1), tensor, 5));
    over.pass();
    return 0;
  });
  over.open();
  expect_all_well();
}

// Default version numbers: a rank that comes back continues from its own rank's last version, whatever has happened to
// sends in the meantime.
TEST_F(Numbering, ASendingRankThatComesBackCountsOnWithItsOwnRank) {
  Barrier over;
  const auto send_until = [](Batch& batch, int64_t last) {
    int64_t sent = 0;
    for (int i = 0; i < 20 && sent < last; ++i) went_well([&] { sent = batch.send({}, kAttempt).wait(); });
    return sent >= last;
  };
  start(trainer(0), [&](Batch& batch, std::vector<float>&) {
    batch.send({}, kPatience).wait();
    went_well([&] { batch.send({}, kAttempt).wait(); });           // its own rank dies
    went_well([&] { batch.send({}, milliseconds(700)).wait(); });  // it is not back, or not in time
    REQUIRE_HERE(send_until(batch, 5));
    over.pass();
    return 0;
  });
  const pid_t dying = start(trainer(1), [&](Batch& batch, std::vector<float>&) {
    batch.send({}, kPatience).wait();
    std::this_thread::sleep_for(milliseconds(200));
    ::kill(::getpid(), SIGKILL);
    return 0;
  });
  start("trainer/1, again", [&, dying] {
    await_end(dying);
    std::this_thread::sleep_for(milliseconds(300));
    return with_batch(trainer(1), store_, [&](Batch& batch, std::vector<float>&) {
      REQUIRE_HERE(send_until(batch, 5));
      over.pass();
      return 0;
    });
  });
  for (const Rank rank : {0, 1})
    start(inference(rank), [&](Batch& batch, std::vector<float>&) {
      for (int i = 0; i < 40 && batch.version() < 5; ++i) went_well([&] { batch.recv({}, kAttempt).wait(); });
      REQUIRE_HERE(batch.version() >= 5);
      over.pass();
      return 0;
    });
  over.open();
  EXPECT_EQ(of(dying).status, -SIGKILL);
  expect_all_well(3 * hang_limit());
}

}  // namespace
}  // namespace tessera::test
