// Ranks against a peer whose protocol a test speaks by hand: it takes its time, or sends what it must not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <thread>

#include "tests/support/fixture.h"
#include "tests/support/raw_rank.h"

namespace tessera::test {
namespace {

using bus::Digests;
using bus::Done;
using bus::Grant;
using bus::Offer;
using bus::ProgressReport;
using bus::Refuse;
using bus::Revoke;
using bus::Take;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::AllOf;
using testing::HasSubstr;

// One tensor, private and replicated, between two jobs.
constexpr Index kElements = 1 << 20;
TensorSpec spec(std::vector<float>& data, const char* layout = "") {
  TensorSpec spec{.name = "t", .data = data.data(), .dtype = DType::kF32, .shape = {static_cast<Index>(data.size())}};
  if (*layout != '\0') spec.layout = Layout::parse(layout);
  return spec;
}

class RawPeer : public JobsTest {
 protected:
  // A real sender, whose batch `body` uses.
  void start_trainer(const std::function<int(Batch&)>& body, Timeout stall = kTransferTimeout) {
    start("trainer/0", [=, this] {
      Bus bus({.job = "trainer", .store = store_, .threads = 1, .stall = stall});
      Pair pair = bus.pair({.name = "weights", .peer = "inference"});
      std::vector<float> data(kElements);
      const TensorSpec tensor = spec(data);
      Batch batch = pair.offer("policy", {&tensor, 1});
      return body(batch);
    });
  }
  // A scripted receiver, attached to trainer/0 and offered version 1.
  void start_puller(Rank rank, int world, bool stream, const std::function<int(RawRank&)>& body) {
    start(inference(rank, world), [=](RawRank& raw) {
      std::vector<float> data(kElements);
      const TensorSpec tensor = spec(data);
      raw.exchange({&tensor, 1}, false);
      raw.attach_to(0, stream);
      (void)raw.next<Offer>();
      return body(raw);
    });
  }
};

int offer_once(Batch& batch) {
  batch.send().wait();
  return 0;
}

TEST_F(RawPeer, ATakeWithoutAnEpochEndsTheConnectionAndNoMore) {
  start_trainer(offer_once);
  start_puller(0, 1, true, [](RawRank& raw) {
    raw.send(Take{.version = 1, .epoch = 0});
    (void)raw.next<Grant>();
    return 0;
  });
  EXPECT_EQ(of("trainer/0").status, kMismatch) << of("trainer/0").output;
  EXPECT_THAT(of("trainer/0").output, AllOf(HasSubstr("inference/0"), HasSubstr("epoch 0 out of turn")));
  EXPECT_THAT(of("inference/0").output, HasSubstr("out of turn"));
}

TEST_F(RawPeer, ATakeWhileTheStreamIsBeingFilledEndsTheConnectionAndNoMore) {
  start_trainer(offer_once);
  start_puller(0, 1, true, [](RawRank& raw) {
    raw.send(Take{.version = 1, .epoch = 1});
    (void)raw.next<Grant>();
    raw.send(Done{.version = 1, .bytes = 0, .status = {}});  // nothing was drained
    raw.send(Take{.version = 1, .epoch = 2});
    (void)raw.next<Grant>();
    return 0;
  });
  EXPECT_EQ(of("trainer/0").status, 0) << of("trainer/0").output;  // it was told that all had arrived
  EXPECT_THAT(of("trainer/0").output, AllOf(HasSubstr("inference/0"), HasSubstr("out of turn")));
  EXPECT_THAT(of("inference/0").output, HasSubstr("out of turn"));
}

// Longer than a transfer may stall, and than the operation's own time, but always making progress.
TEST_F(RawPeer, ASlowReceiverIsWaitedForAsLongAsItProgresses) {
  static constexpr milliseconds kStall{1000};
  start_trainer(
      [](Batch& batch) {
        batch.send({}, milliseconds(500)).wait();
        return 0;
      },
      kStall);
  start_puller(0, 1, false, [](RawRank& raw) {
    raw.send(Take{.version = 1, .epoch = 1});
    (void)raw.next<Grant>();
    constexpr int kReports = 50;
    for (int i = 1; i <= kReports; ++i) {
      std::this_thread::sleep_for(kStall / 20);
      raw.send(ProgressReport{.version = 1, .bytes = i});
    }
    (void)raw.next<Digests>();
    raw.send(Done{.version = 1, .bytes = 1, .status = {}});
    return 0;
  });
  EXPECT_EQ(of("trainer/0").status, 0) << of("trainer/0").output;
  EXPECT_EQ(of("inference/0").status, 0) << of("inference/0").output;
}

TEST_F(RawPeer, AReceiverThatStandsStillIsNamed) {
  start_trainer(
      [](Batch& batch) {
        batch.send({}, milliseconds(100)).wait();
        return 0;
      },
      milliseconds(300));
  start_puller(0, 1, false, [](RawRank& raw) {
    raw.send(Take{.version = 1, .epoch = 1});
    (void)raw.next<Grant>();
    const auto revoke = raw.until<Revoke>();
    raw.send(Done{.version = 1, .bytes = 0, .status = revoke.reason});
    return revoke.epoch == 1 && revoke.reason.code() == ErrorCode::kDeadlineExceeded ? 0 : 1;
  });
  EXPECT_EQ(of("inference/0").status, 0) << of("inference/0").output;
  EXPECT_EQ(of("trainer/0").status, kDeadline) << of("trainer/0").output;
  EXPECT_THAT(of("trainer/0").output, HasSubstr("inference/0 did not finish"));
}

// One receiver finds the data damaged: the other is told that, and not that the sender changed its mind.
TEST_F(RawPeer, WhoeverIsToldToStopReadingIsToldWhy) {
  const Signal reading;
  const Signal refused;
  start_trainer([&](Batch& batch) {
    Handle handle = batch.send();
    handle.wait_for(hang_limit());
    refused.wait();  // with the batch still open
    handle.wait();
    return 0;
  });
  start_puller(0, 2, false, [&](RawRank& raw) {
    raw.send(Take{.version = 1, .epoch = 1});
    (void)raw.next<Grant>();
    reading.raise();
    const auto revoke = raw.until<Revoke>();
    raw.send(Done{.version = 1, .bytes = 0, .status = revoke.reason});
    refused.wait();  // once it goes the session is over
    revoke.reason.throw_if_error();
    return 0;
  });
  start_puller(1, 2, false, [&](RawRank& raw) {
    reading.wait();
    raw.send(Done{.version = 1, .bytes = 0, .status = Status(ErrorCode::kDataLoss, "the digest of t differs")});
    (void)raw.next<bus::Withdraw>();
    raw.send(Take{.version = 1, .epoch = 1});
    const Refuse refuse = raw.next<Refuse>();
    for (int i = 0; i < 2; ++i) refused.raise();
    return refuse.reason.code() == ErrorCode::kDataLoss ? 0 : 1;
  });
  EXPECT_EQ(of("trainer/0").status, kDataLoss) << of("trainer/0").output;
  EXPECT_EQ(of("inference/0").status, kDataLoss) << of("inference/0").output;
  EXPECT_THAT(of("inference/0").output, AllOf(HasSubstr("inference/1"), HasSubstr("the digest of t differs")));
  EXPECT_EQ(of("inference/1").status, 0) << of("inference/1").output;
}

// The owner of Partial terms must be asked before its memory is read, in whichever way, and may refuse.
TEST_F(RawPeer, TermsAreNotReadBeforeTheirOwnerIsAsked) {
  static constexpr Index kOne = 1;  // element, so that one rank reduces it all
  start("trainer/0", [this] {
    ::setenv("TESSERA_FORCE_PULL", "readv", 1);
    Bus bus({.job = "trainer", .world = 2, .store = store_, .threads = 1});
    Pair pair = bus.pair({.name = "weights", .peer = "inference"});
    std::vector<float> data(kOne);
    const TensorSpec tensor = spec(data, "2:Psum");
    Batch batch = pair.offer("policy", {&tensor, 1});
    batch.send().wait();
    return 0;
  });
  start(trainer(1), [&](RawRank& raw) {
    std::vector<float> data(kOne);
    const TensorSpec tensor = spec(data, "2:Psum");
    raw.exchange({&tensor, 1}, true);
    raw.serve();
    raw.send_place(data);
    (void)raw.next<Prepare>();
    raw.send(Prepared{});
    raw.send(Offer{.version = 1});
    const Take take = raw.next<Take>();
    raw.send(Refuse{.version = 1, .epoch = take.epoch, .reason = Status(ErrorCode::kCancelled, "it is gone")});
    const Done done = raw.next<Done>();
    return done.status.ok() ? 1 : 0;
  });
  start("inference/0", [this] {
    Bus bus({.job = "inference", .store = store_, .threads = 1});
    Pair pair = bus.pair({.name = "weights", .peer = "trainer"});
    std::vector<float> data(kOne);
    const TensorSpec tensor = spec(data);
    Batch batch = pair.accept("policy", {&tensor, 1});
    batch.wait_version(1);
    return 0;
  });
  EXPECT_EQ(of("trainer/1").status, 0) << of("trainer/1").output;
  EXPECT_EQ(of("trainer/0").status, kPeerLost) << of("trainer/0").output;
  EXPECT_THAT(of("trainer/0").output, HasSubstr("trainer/1 has given up version 1: it is gone"));
  EXPECT_EQ(of("inference/0").status, kPeerLost) << of("inference/0").output;
}

// Ranks of one sending job have no connection that would tell. trainer/0 has read trainer/1's first registration; the
// receiver reads the second.
TEST_F(RawPeer, AnOwnRankThatRegistersAgainIsReadAgain) {
  Barrier over;  // trainer/0 comes to it by ending
  start("trainer/0", [this] {
    Bus bus({.job = "trainer", .rank = 0, .world = 2, .store = store_, .threads = 1});
    Pair pair = bus.pair({.name = "weights", .peer = "inference"});
    std::vector<float> data(kElements);
    const TensorSpec tensor = spec(data, "2:R");
    Batch batch = pair.offer("policy", {&tensor, 1});
    return offer_once(batch);
  });
  start(trainer(1), [&](RawRank& raw) {
    std::vector<float> data(kElements);
    const TensorSpec tensor = spec(data, "2:R");
    raw.register_first({&tensor, 1}, true);
    std::this_thread::sleep_for(milliseconds(300));  // trainer/0 reads it
    raw.take_back();
    raw.exchange({&tensor, 1}, true);
    over.pass();
    return 0;
  });
  start(inference(0, 1), [&](RawRank& raw) {
    std::vector<float> data(kElements);
    const TensorSpec tensor = spec(data);
    std::this_thread::sleep_for(milliseconds(500));  // the second is there
    raw.exchange({&tensor, 1}, false);
    raw.attach_to(0, true);
    const int64_t version = raw.next<Offer>().version;
    raw.send(Detach{});
    over.pass();
    return version == 1 ? 0 : 1;
  });
  over.open();
  EXPECT_EQ(of("inference/0").status, 0) << of("inference/0").output;
}

}  // namespace
}  // namespace tessera::test
