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

// A send that fails on this rank alone: it is counted here.
bool is_given_up(Handle& sent) {
  if (!sent.cancel()) return false;
  return fails_with([&] { sent.wait(); }, ErrorCode::kCancelled, "");
}

class Numbering : public JobsTest {
 protected:
  // Trainer 1 dies after a first version. When it is back, trainer 0 has a send under way that it did not know of as
  // they met, and gives that up; so what it sends next is one more than trainer 1 counts.
  void come_back_one_behind(const std::function<Side(Rank rank)>& sender, const Side& receiver, bool agents);
};

void Numbering::come_back_one_behind(const std::function<Side(Rank rank)>& sender, const Side& receiver, bool agents) {
  const Signal sent_first, waits, back;
  Barrier over;
  if (agents)
    for (const Rank rank : {0, 1}) start_agent(sender(rank));
  start(sender(0), [&](Batch& batch, std::vector<float>& tensor) {
    fill(sender(0), tensor, 1);
    batch.send({}, kPatience).wait();
    sent_first.raise();
    went_well([&] { batch.send({}, kPatience).wait(); });  // its own rank dies
    {
      Handle sent = batch.send({}, kPatience);
      waits.raise();
      back.wait();
      REQUIRE_HERE(is_given_up(sent));
    }
    fill(sender(0), tensor, 9);
    batch.send({}, kPatience).wait();
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
    while (batch.version() < 2) went_well([&] { batch.recv({}, kPatience).wait(); });
    REQUIRE_HERE(holds(receiver, tensor, 9));
    over.pass();
    return 0;
  });
  start("trainer/1, again", [&, dying] {
    await_end(dying);
    waits.wait();
    return with_batch(sender(1), store_, [&](Batch& batch, std::vector<float>& tensor) {
      back.raise();
      fill(sender(1), tensor, 9);
      batch.send({}, kPatience).wait();
      over.pass();
      return 0;
    });
  });
  over.open();
  EXPECT_EQ(of(dying).status, -SIGKILL);
  expect_all_well();
}

TEST_F(Numbering, ASendingRankComesBackAmongSendsThatFail) {
  come_back_one_behind([](Rank rank) { return trainer(rank); }, inference(0, 1), false);
}

TEST_F(Numbering, ASendingRankComesBackBehindAnAgent) {
  come_back_one_behind([](Rank rank) { return with_agent(trainer(rank)); }, inference(0, 1), true);
}

// Default version numbers: a rank that comes back continues from its own rank's last version, whatever has happened to
// sends in the meantime.
TEST_F(Numbering, ASendingRankThatComesBackCountsOnWithItsOwnRank) {
  Barrier over;
  const auto send_until = [](Batch& batch, int64_t last) {
    int64_t sent = 0;
    for (int i = 0; i < 20 && sent < last; ++i) went_well([&] { sent = batch.send({}, kPatience).wait(); });
    return sent >= last;
  };
  start(trainer(0), [&](Batch& batch, std::vector<float>&) {
    batch.send({}, kPatience).wait();
    went_well([&] { batch.send({}, kPatience).wait(); });          // its own rank dies
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
      for (int i = 0; i < 40 && batch.version() < 5; ++i) went_well([&] { batch.recv({}, kPatience).wait(); });
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
