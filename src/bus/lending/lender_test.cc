// Both ends of memory that a worker lends: what the worker does for its agent, and that it trusts nothing it receives.
#include "bus/lending/lender.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <set>

#include "base/message.h"
#include "base/socket.h"
#include "base/testing.h"
#include "bus/session/versions.h"
#include "exec/pull/source.h"
#include "memory/host/shared_arena.h"
#include "tessera/memory.h"
#include "transport/shm/bounce_ring.h"

namespace tessera::bus {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

const Identity kLendingRank{.name_space = "default", .job = "trainer", .rank = 0, .world = 1};
constexpr Duration kLendingLimit = seconds(20);
const Shape kLentShape{8, 16};

// A worker that has registered one f32 tensor of 8 x 16, and its agent's socket.
class Worker {
 public:
  explicit Worker(bool sends = true) {
    std::iota(values_.begin(), values_.end(), 1.0f);
    lender_.emplace("trainer/0", tensors_, sends, 2);
    socket_ = lender_->take_agent_end();
  }
  const LocalTensor& tensor() const { return tensors_.front(); }
  std::vector<float>& values() { return values_; }

  template <typename Message>
  void send(const Message& message, std::vector<UniqueFd> fds = {}) {
    writer_.push(static_cast<uint16_t>(Message::kType), message_bytes(message), std::move(fds));
    writer_.flush(socket_.get(), Deadline::after(kLendingLimit));
  }
  template <typename Message>
  Message next() {
    while (true) {
      const Frame frame = wait_frame(socket_.get(), reader_, Deadline::after(kLendingLimit));
      if (frame.type == kCode<RunProgress>) continue;
      EXPECT_EQ(frame.type, static_cast<uint16_t>(Message::kType));
      return parse<Message>(frame.payload);
    }
  }
  // Why it closes the connection after the last message.
  std::string refusal() { return next<Reject>().text; }
  void close() { lender_.reset(); }
  void quiesce() { lender_->quiesce(); }

 private:
  std::vector<float> values_ = std::vector<float>(8 * 16);
  const TensorSpec spec_{.name = "weight",
                         .data = values_.data(),
                         .dtype = DType::kF32,
                         .shape = kLentShape,
                         .layout = Layout::parse("1:R")};
  const Manifest manifest_ = manifest_of(kLendingRank, {&spec_, 1});
  const std::vector<LocalTensor> tensors_ = registered_tensors(manifest_, {&spec_, 1}, 0);
  std::optional<Lender> lender_;
  UniqueFd socket_;
  FrameWriter writer_{kBusMagic, 1, size_t{1} << 20};
  FrameReader reader_{kBusMagic, {.payload_bytes = 1 << 20, .fds = 0}};
};

const LentPlace kLentTensor{.kind = LentPlace::Kind::kTensor, .tensor = 0, .memory = {}, .array = {}};

RouteRegion rows(Index begin, Index end) {
  return {.tensor = 0,
          .shape = kLentShape,
          .dtype = DType::kF32,
          .region = Region({IntervalSet({begin, end}), IntervalSet({0, 16})})};
}

MakeRun source(uint32_t run, bool stream, std::vector<LentRoute> routes) {
  for (LentRoute& route : routes) route.streamed = stream;
  return {.run = run,
          .kind = MakeRun::Kind::kSource,
          .digest = true,
          .stream = stream,
          .peer_name = "inference/0",
          .routes = std::move(routes)};
}

std::vector<UniqueFd> ring_of(const BounceRing& ring) {
  std::vector<UniqueFd> fds;
  fds.push_back(duplicate_fd(ring.fd()));
  return fds;
}

// A read ends after a message with descriptors; a caller that polls also wants what came after it.
TEST(Lender, HearsAllThatHasComeWhenItPolls) {
  EventLoop loop("link-test");  // not started: this thread acts as its own
  SocketPair sockets = socket_pair();
  const auto link = Link::adopt(loop, std::move(sockets.first), "the agent");
  link->set_limits({.payload_bytes = 1 << 10, .fds = 1});
  int frames = 0;
  link->set_handlers([&](Frame&) { ++frames; }, [](const Status&) {});
  FrameWriter writer(kBusMagic, 1, 1 << 20);
  for (int i = 0; i < 3; ++i) {
    std::vector<UniqueFd> fds;
    fds.push_back(duplicate_fd(sockets.second.get()));
    writer.push(kCode<GiveStream>, {}, std::move(fds));
    writer.push(kCode<StartRun>, {});
    writer.flush(sockets.second.get(), Deadline::after(kLendingLimit));
  }
  link->poll();
  EXPECT_EQ(frames, 6);
  link->close();
}

TEST(Lender, DigestsWhatItIsAskedTo) {
  Worker worker;
  worker.send(source(1, false, {{.what = rows(0, 8), .src = kLentTensor, .dst = {}}}));
  worker.send(StartRun{.run = 1, .epoch = 5});
  const auto ended = worker.next<RunEnded>();
  EXPECT_TRUE(ended.status.ok()) << ended.status.message();
  EXPECT_EQ(ended.epoch, 5u);
  EXPECT_EQ(ended.bytes, 8 * 16 * 4);
  ASSERT_EQ(ended.digests.size(), 1u);
  EXPECT_EQ(ended.digests[0].elements, 8u * 16);

  worker.values()[3] = -1;
  worker.send(StartRun{.run = 1, .epoch = 6});
  const auto changed = worker.next<RunEnded>();
  EXPECT_TRUE(changed.status.ok());
  EXPECT_FALSE(changed.digests[0] == ended.digests[0]);
}

TEST(Lender, FillsAStreamAndStopsWhenItIsAborted) {
  Worker worker;
  const auto ring = BounceRing::create();
  worker.send(source(1, true, {{.what = rows(2, 4), .src = kLentTensor, .dst = {}}}));
  worker.send(GiveStream{.run = 1, .transport = "shm"}, ring_of(*ring));
  worker.send(StartRun{.run = 1, .epoch = 1});  // nobody drains it
  worker.send(AbortRun{.run = 1, .status = failed(ErrorCode::kPeerLost, "it has died"_message)});
  const auto aborted = worker.next<RunEnded>();
  EXPECT_EQ(aborted.status.code(), ErrorCode::kPeerLost);
  EXPECT_THAT(aborted.status.message(), HasSubstr("it has died"));

  worker.send(StartRun{.run = 1, .epoch = 2});
  ring->begin_consume(2);
  const std::span<const std::byte> frame = ring->acquire(Deadline::after(kLendingLimit));
  ASSERT_EQ(frame.size(), 2u * 16 * 4);
  std::vector<float> packed(32);
  std::memcpy(packed.data(), frame.data(), frame.size());
  EXPECT_EQ(packed.front(), 33.0f);
  EXPECT_EQ(packed.back(), 64.0f);
  ring->release();
  EXPECT_TRUE(worker.next<RunEnded>().status.ok());
}

TEST(Lender, BeginsAgainOnceARunThatWasGivenUpHasEnded) {
  Worker worker;
  const auto ring = BounceRing::create();
  worker.send(source(1, true, {{.what = rows(0, 1), .src = kLentTensor, .dst = {}}}));
  worker.send(GiveStream{.run = 1, .transport = "shm"}, ring_of(*ring));
  worker.send(source(2, false, {{.what = rows(0, 8), .src = kLentTensor, .dst = {}}}));
  worker.send(StartRun{.run = 1, .epoch = 1});  // nobody drains it
  worker.send(AbortRun{.run = 1, .status = failed(ErrorCode::kPeerLost, "it is stopped"_message)});
  worker.send(StartRun{.run = 2, .epoch = 2});  // no other run overtakes it
  worker.send(StartRun{.run = 1, .epoch = 2});
  const auto first = worker.next<RunEnded>();
  EXPECT_EQ(first.run, 1u);
  EXPECT_EQ(first.epoch, 1u);
  EXPECT_EQ(first.status.code(), ErrorCode::kPeerLost);
  const auto second = worker.next<RunEnded>();
  EXPECT_EQ(second.run, 2u);
  EXPECT_TRUE(second.status.ok());
  ring->begin_consume(2);
  EXPECT_EQ(ring->acquire(Deadline::after(kLendingLimit)).size(), 16u * 4);
  ring->release();
  const auto third = worker.next<RunEnded>();
  EXPECT_EQ(third.epoch, 2u);
  EXPECT_TRUE(third.status.ok());
}

// A copy of the whole tensor to the agent's memory, or from there.
class Copies {
 public:
  MakeRun to_agent(uint32_t run) const { return copy(run, kLentTensor, place_); }
  MakeRun to_tensor(uint32_t run) const { return copy(run, place_, kLentTensor); }
  void lend(Worker& worker, uint32_t run, bool writable) {
    std::vector<UniqueFd> fds;
    fds.push_back(duplicate_fd(arena_.fd_for_agent()));
    worker.send(LendArenas{.run = run, .writable = writable, .arenas = {9}}, std::move(fds));
  }
  float* values() { return reinterpret_cast<float*>(arena_.data() + 4096); }
  SharedArena& arena() { return arena_; }

 private:
  static MakeRun copy(uint32_t run, const LentPlace& from, const LentPlace& to) {
    return {.run = run,
            .kind = MakeRun::Kind::kPull,
            .peer_name = "",
            .routes = {{.what = rows(0, 8), .src = from, .dst = to, .dst_dtype = DType::kF32}}};
  }
  SharedArena arena_{9, 1 << 20};
  const LentPlace place_{.kind = LentPlace::Kind::kAgent,
                         .tensor = 0,
                         .memory = {9, 4096, 8 * 16 * 4},
                         .origin = 0,
                         .array = {Region::full(kLentShape), {64, 4}}};
};

Status outcome_of(Worker& worker, uint32_t run) {
  worker.send(StartRun{.run = run, .epoch = 1});
  return worker.next<RunEnded>().status;
}

TEST(Lender, CopiesATensorToTheAgentsMemory) {
  Worker worker;
  Copies copies;
  copies.lend(worker, 1, true);
  worker.send(copies.to_agent(1));
  worker.send(Sync{.number = 3});
  const auto synced = worker.next<Synced>();
  EXPECT_EQ(synced.number, 3u);
  EXPECT_TRUE(synced.status.ok()) << synced.status.message();
  EXPECT_TRUE(outcome_of(worker, 1).ok());
  EXPECT_TRUE(std::ranges::equal(worker.values(), std::span(copies.values(), 128)));

  // Sealed since, as anything given to a peer is: no other run can get it for writing, and reports so.
  copies.arena().fd_for_peer();
  copies.lend(worker, 2, true);
  worker.send(copies.to_agent(2));
  worker.send(Sync{.number = 4});
  EXPECT_EQ(worker.next<Synced>().status.code(), ErrorCode::kPermissionDenied);
  EXPECT_EQ(outcome_of(worker, 2).code(), ErrorCode::kPermissionDenied);
}

TEST(Lender, CopiesTheAgentsMemoryToATensor) {
  Worker worker(false);
  Copies copies;
  copies.lend(worker, 1, false);
  worker.send(copies.to_tensor(1));
  std::iota(copies.values(), copies.values() + 128, 1000.0f);
  EXPECT_TRUE(outcome_of(worker, 1).ok());
  EXPECT_TRUE(std::ranges::equal(worker.values(), std::span(copies.values(), 128)));
}

TEST(Lender, WritesOnlyWhereItMay) {
  Copies copies;
  Worker sender;
  copies.lend(sender, 1, false);
  sender.send(copies.to_agent(1));
  EXPECT_THAT(outcome_of(sender, 1).message(), HasSubstr("arena 9 is not to be written"));
  copies.lend(sender, 2, false);
  sender.send(copies.to_tensor(2));
  EXPECT_THAT(outcome_of(sender, 2).message(), HasSubstr("tensor 0 is sent, not written"));
  Worker receiver(false);
  copies.lend(receiver, 1, true);
  receiver.send(copies.to_agent(1));
  EXPECT_THAT(outcome_of(receiver, 1).message(), HasSubstr("tensor 0 is received, not read"));
}

// Although the peer claims to be this very process, where an address would do.
TEST(Lender, ReadsNothingByAddress) {
  const std::vector<float> secret(128);
  MakeRun pull{
      .run = 1, .kind = MakeRun::Kind::kPull, .peer_name = "trainer/1", .peer = Incarnation::self(), .routes = {}};
  const RemoteRange memory{.key = 0, .offset = reinterpret_cast<uintptr_t>(secret.data()), .bytes = 512};
  const LentPlace place{.kind = LentPlace::Kind::kPeer,
                        .tensor = 0,
                        .memory = memory,
                        .origin = 0,
                        .array = {Region::full(kLentShape), {64, 4}}};
  pull.routes = {{.what = rows(0, 8), .src = place, .dst = kLentTensor, .dst_dtype = DType::kF32}};
  const auto outcome = [&](std::string_view transport) {
    Worker worker(false);
    LendKeys lend{.run = 1};
    lend.keys.push_back(TransportRegistry::builtin().find(transport)->export_region({}));
    worker.send(lend);
    worker.send(pull);
    return outcome_of(worker, 1).message();
  };
  EXPECT_THAT(outcome("shm"), HasSubstr("want it otherwise"));
  EXPECT_THAT(outcome("loopback"), HasSubstr("for memory of this very process"));
}

TEST(Lender, ARunThatIsAbortedBeforeItBeginsEndsToo) {
  Worker worker;
  const auto ring = BounceRing::create();
  worker.send(source(1, true, {{.what = rows(0, 8), .src = kLentTensor, .dst = {}}}));
  worker.send(GiveStream{.run = 1, .transport = "shm"}, ring_of(*ring));
  const AbortRun abort{.run = 1, .status = failed(ErrorCode::kPeerLost, "it has died"_message)};
  worker.send(StartRun{.run = 1, .epoch = 1});
  worker.send(abort);
  worker.send(StartRun{.run = 1, .epoch = 2});
  worker.send(abort);
  std::set<uint32_t> ended;  // in either order: it depends on the first one's thread
  while (ended.size() < 2) {
    const auto one = worker.next<RunEnded>();
    EXPECT_EQ(one.status.code(), ErrorCode::kPeerLost);
    EXPECT_TRUE(ended.insert(one.epoch).second);
  }
  EXPECT_THAT(ended, ElementsAre(1, 2));
}

TEST(Lender, IsQuietOnceAnOperationHasFailed) {
  Worker worker;
  const auto ring = BounceRing::create();
  worker.send(source(1, true, {{.what = rows(0, 8), .src = kLentTensor, .dst = {}}}));
  worker.send(GiveStream{.run = 1, .transport = "shm"}, ring_of(*ring));
  worker.send(StartRun{.run = 1, .epoch = 1});
  worker.quiesce();  // all earlier messages have been handled
  EXPECT_EQ(worker.next<RunEnded>().status.code(), ErrorCode::kCancelled);
  worker.send(source(2, false, {{.what = rows(0, 8), .src = kLentTensor, .dst = {}}}));
  EXPECT_TRUE(outcome_of(worker, 2).ok());
}

TEST(Lender, WhatIsNoStreamFailsTheRunAndNoMore) {
  Worker worker;
  worker.send(source(1, true, {{.what = rows(0, 8), .src = kLentTensor, .dst = {}}}));
  SharedArena other(1, 1 << 20);
  std::vector<UniqueFd> fds;
  fds.push_back(duplicate_fd(other.fd_for_agent()));
  worker.send(GiveStream{.run = 1, .transport = "shm"}, std::move(fds));
  EXPECT_THAT(outcome_of(worker, 1).message(), HasSubstr("bounce ring"));
  worker.send(DropRun{.run = 1});
  worker.send(DropRun{.run = 7});  // one that was never made
  worker.send(source(2, false, {{.what = rows(0, 8), .src = kLentTensor, .dst = {}}}));
  EXPECT_TRUE(outcome_of(worker, 2).ok());
}

// What an agent must not send: the connection ends, and the worker's memory and process are unharmed.
TEST(Lender, BelievesNothing) {
  const auto refused = [](const std::function<void(Worker&)>& say) {
    Worker worker;
    say(worker);
    return worker.refusal();
  };
  const auto refused_run = [](const std::vector<LentRoute>& routes, bool stream = false) {
    Worker worker;
    worker.send(source(1, stream, routes));
    worker.send(StartRun{.run = 1, .epoch = 1});
    const auto ended = worker.next<RunEnded>();
    EXPECT_EQ(ended.status.code(), ErrorCode::kMismatch);
    return ended.status.message();
  };
  EXPECT_THAT(refused([](Worker& worker) { worker.send(StartRun{.run = 1, .epoch = 1}); }), HasSubstr("unknown"));
  EXPECT_THAT(refused([](Worker& worker) { worker.send(GiveStream{.run = 1, .transport = "shm"}); }),
              HasSubstr("unknown"));
  EXPECT_THAT(refused([](Worker& worker) { worker.send(Offer{.version = 1}); }), HasSubstr("unexpected message"));
  EXPECT_THAT(refused([](Worker& worker) { worker.send(LendArenas{.run = 1, .arenas = {1}}); }),
              HasSubstr("1 arenas with 0 descriptors"));
  EXPECT_THAT(refused([](Worker& worker) {
                worker.send(source(1, true, {{.what = rows(0, 8), .src = kLentTensor, .dst = {}}}));
                worker.send(StartRun{.run = 1, .epoch = 1});
              }),
              HasSubstr("started before it is made"));
  EXPECT_THAT(refused([](Worker& worker) {
                worker.send(source(1, false, {}));
                worker.send(source(1, false, {}));
              }),
              HasSubstr("made twice"));
  EXPECT_THAT(refused([](Worker& worker) {
                const auto ring = BounceRing::create();
                worker.send(source(1, true, {{.what = rows(0, 8), .src = kLentTensor, .dst = {}}}));
                worker.send(GiveStream{.run = 1, .transport = "shm"}, ring_of(*ring));
                worker.send(StartRun{.run = 1, .epoch = 1});
                worker.send(StartRun{.run = 1, .epoch = 2});
              }),
              HasSubstr("started twice"));

  LentPlace other = kLentTensor;
  other.tensor = 1;
  EXPECT_THAT(refused_run({{.what = rows(0, 8), .src = other, .dst = {}}}), HasSubstr("tensor 1 of 1 is not lent"));
  RouteRegion larger = rows(0, 9);
  larger.shape = {9, 16};
  EXPECT_THAT(refused_run({{.what = larger, .src = kLentTensor, .dst = {}}}), HasSubstr("is not within"));
  RouteRegion wider = rows(0, 8);
  wider.dtype = DType::kF64;
  EXPECT_THAT(refused_run({{.what = wider, .src = kLentTensor, .dst = {}}}), HasSubstr("of f64 is not within"));
  const LentPlace elsewhere{.kind = LentPlace::Kind::kAgent,
                            .tensor = 0,
                            .memory = {1, 0, 8 * 16 * 4},
                            .origin = 0,
                            .array = {Region::full(kLentShape), {64, 4}}};
  EXPECT_THAT(refused_run({{.what = rows(0, 8), .src = elsewhere, .dst = {}}}), HasSubstr("was not lent"));
}

TEST(Lender, KeysComeWithTheirDescriptorsBeforeTheirRun) {
  Worker worker;
  LendKeys lend{.run = 1};
  lend.keys.emplace_back().fds.resize(1);
  worker.send(lend);
  EXPECT_THAT(worker.refusal(), HasSubstr("1 keys with 0 descriptors, they have 1"));
  Worker late;
  late.send(source(1, false, {}));
  late.send(LendKeys{.run = 1});
  EXPECT_THAT(late.refusal(), HasSubstr("out of turn"));
}

TEST(Lender, ARunStreamsWhatItIsToldToAndNothingElse) {
  Worker worker;
  MakeRun run = source(1, true, {{.what = rows(0, 8), .src = kLentTensor, .dst = {}}});
  run.routes.front().streamed = false;
  const auto ring = BounceRing::create();
  worker.send(run);
  worker.send(GiveStream{.run = 1, .transport = "shm"}, ring_of(*ring));
  EXPECT_THAT(outcome_of(worker, 1).message(), HasSubstr("want it otherwise"));
}

TEST(Lender, AnArrayOfTheAgentsStaysWithinItsArena) {
  SharedArena arena(1, 1 << 20);
  const LocalArray array{Region::full(kLentShape), {64, 4}};
  const auto status_of = [&](RemoteRange memory, uint64_t origin) {
    Worker worker;
    std::vector<UniqueFd> fds;
    fds.push_back(duplicate_fd(arena.fd_for_agent()));
    worker.send(LendArenas{.run = 1, .arenas = {1}}, std::move(fds));
    const LentPlace place{
        .kind = LentPlace::Kind::kAgent, .tensor = 0, .memory = memory, .origin = origin, .array = array};
    worker.send(source(1, false, {{.what = rows(0, 8), .src = place, .dst = {}}}));
    worker.send(StartRun{.run = 1, .epoch = 1});
    return worker.next<RunEnded>().status.code();
  };
  const uint64_t end = arena.bytes();
  EXPECT_EQ(status_of({1, end - 512, 512}, 0), ErrorCode::kOk);
  EXPECT_EQ(status_of({1, end - 508, 512}, 0), ErrorCode::kMismatch);
  EXPECT_EQ(status_of({1, 0, 508}, 0), ErrorCode::kMismatch);
  EXPECT_EQ(status_of({1, 0, 512}, 4), ErrorCode::kMismatch);
  EXPECT_EQ(status_of({1, end + 512, 512}, 0), ErrorCode::kMismatch);
}

TEST(Lender, EndsWhileARunWaits) {
  Worker worker;
  const auto ring = BounceRing::create();
  worker.send(source(1, true, {{.what = rows(0, 8), .src = kLentTensor, .dst = {}}}));
  worker.send(GiveStream{.run = 1, .transport = "shm"}, ring_of(*ring));
  worker.send(StartRun{.run = 1, .epoch = 1});
  worker.send(Sync{.number = 1});
  worker.next<Synced>();
  worker.close();  // returns
}

}  // namespace
}  // namespace tessera::bus
