// Both ends of the exchange, with each other over a socket pair, and each with invalid messages.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/event_loop.h"
#include "base/message.h"
#include "base/socket.h"
#include "exec/local_runs.h"
#include "exec/testing.h"
#include "peer/exchange/pull_end.h"
#include "peer/exchange/source_end.h"
#include "tessera/memory.h"

namespace tessera {
namespace {

using exec_testing::Completion;
using testing::HasSubstr;

constexpr Index kRows = 8;
constexpr Index kColumns = 16;
constexpr size_t kTensorBytes = kRows * kColumns * sizeof(float);
const Shape kExchangedShape{kRows, kColumns};

// Data at the addresses in `packed` lies in memory that is packed into streams.
class SomePacked final : public LocalRuns {
 public:
  using LocalRuns::LocalRuns;
  LocalMemory describe(const std::byte* data, size_t bytes) const override {
    return {.data = data, .bytes = bytes, .packed = packed.contains(data)};
  }
  std::set<const std::byte*> packed;
};

// f32 tensors of one shape, whose routes are their upper and lower halves.
class Tensors {
 public:
  explicit Tensors(size_t count, float first = 0) : values_(count, std::vector<float>(kRows * kColumns)) {
    for (std::vector<float>& one : values_) {
      std::iota(one.begin(), one.end(), first);
      first += kRows * kColumns;
    }
  }
  std::byte* data(size_t tensor) { return reinterpret_cast<std::byte*>(values_[tensor].data()); }
  const std::vector<std::vector<float>>& values() const { return values_; }

  static RouteRegion half(uint32_t tensor, Index which) {
    const IntervalSet rows({which * kRows / 2, (which + 1) * kRows / 2});
    return {.tensor = tensor,
            .shape = kExchangedShape,
            .dtype = DType::kF32,
            .region = Region({rows, IntervalSet({0, kColumns})})};
  }
  static LocalArray whole() {
    return {.owned = Region::full(kExchangedShape), .strides = {kColumns * sizeof(float), sizeof(float)}};
  }
  std::vector<ServedRoute> served() {
    std::vector<ServedRoute> routes;
    for (uint32_t t = 0; t < values_.size(); ++t)
      for (const Index which : {0, 1})
        routes.push_back({.route = {.what = half(t, which), .src = whole(), .data = data(t)}});
    return routes;
  }
  std::vector<WantedRoute> wanted() {
    std::vector<WantedRoute> routes;
    for (uint32_t t = 0; t < values_.size(); ++t)
      for (const Index which : {0, 1}) {
        PullRoute route{.what = half(t, which)};
        route.src.owned = Region::full(kExchangedShape);
        route.dst = whole();
        route.dst_dtype = DType::kF32;
        route.data = data(t);
        routes.push_back({.route = std::move(route)});
      }
    return routes;
  }

 private:
  std::vector<std::vector<float>> values_;
};

// A link over one end of a socket pair, on this thread, whose frames go to `handle`.
class LinkEnd {
 public:
  LinkEnd(EventLoop& loop, UniqueFd socket, const std::string& peer, std::function<void(Link&, Frame&)> handle)
      : link_(Link::adopt(loop, std::move(socket), peer)) {
    link_->set_limits({.payload_bytes = kMaxMessageBytes, .fds = kMaxFdsPerMessage});
    link_->set_handlers([this, handle = std::move(handle)](Frame& frame) { handle(*link_, frame); },
                        [this](const Status& status) { ended_ = status; });
  }
  ~LinkEnd() { link_->close(); }
  LinkEnd(const LinkEnd&) = delete;
  LinkEnd& operator=(const LinkEnd&) = delete;

  Link& link() { return *link_; }
  // Why the link ended, once everything that has arrived is handled.
  Status ended() {
    if (ended_.ok()) link_->poll();
    return ended_;
  }

 private:
  std::shared_ptr<Link> link_;
  Status ended_;
};

// Two ends, with their threads and the sockets between them.
class ExchangeTest : public testing::Test {
 protected:
  ExchangeTest() : sockets_(socket_pair()) {}

  // Has the ends that exist handle everything that was sent.
  void settle() {
    for (int i = 0; i < 3; ++i) {
      if (source_link_) source_status_ = source_link_->ended();
      if (pull_link_) pull_status_ = pull_link_->ended();
    }
  }
  void make_source(std::vector<ServedRoute> routes, uint32_t slots = 1) {
    source_.emplace(runs_, exec_testing::own_endpoint(), std::move(routes), slots, true, filled_.callback());
    source_link_.emplace(loop_, std::move(sockets_.first), "inference/0", [this](Link& link, Frame& frame) {
      if (frame.type != kCode<Prepare>) fail(ErrorCode::kMismatch, "unexpected message {}"_message, frame.type);
      source_->handle_prepare(link, frame);
    });
  }
  void make_pull(std::vector<WantedRoute> routes, const PullEnd::Options& options = {}) {
    pull_.emplace(runs_, exec_testing::own_endpoint(), std::move(routes), options, drained_.callback());
    pull_link_.emplace(loop_, std::move(sockets_.second), "trainer/0", [this](Link& link, Frame& frame) {
      frame.type == kCode<Attached> ? pull_->handle_attached(link, frame) : pull_->handle_prepared(frame);
    });
  }
  // A link that sends in place of an end.
  Link& say_as_source() {
    if (!by_hand_) by_hand_.emplace(loop_, std::move(sockets_.first), "inference/0", [](Link&, Frame&) {});
    return by_hand_->link();
  }
  Link& say_as_puller() {
    if (!by_hand_) by_hand_.emplace(loop_, std::move(sockets_.second), "trainer/0", [](Link&, Frame&) {});
    return by_hand_->link();
  }
  // With the descriptors that its keys have, even if these are fewer than the keys announce.
  void send(Link& link, Attached attached) {
    std::vector<UniqueFd> fds = detach_fds(attached.keys);
    std::erase_if(fds, [](const UniqueFd& fd) { return !fd; });
    link.send(attached, std::move(fds));
  }
  // What a source in this process would send for these tensors.
  Attached attached_of(Tensors& tensors) {
    Exporter exporter(TransportRegistry::builtin(), exec_testing::own_endpoint(), exec_testing::own_endpoint());
    Attached attached;
    for (size_t t = 0; t < tensors.values().size(); ++t)
      attached.places.push_back({.memory = exporter.add({.data = tensors.data(t), .bytes = kTensorBytes}).range,
                                 .strides = Tensors::whole().strides});
    attached.keys = exporter.take_keys();
    return attached;
  }
  // The message with which a puller of two tensors ends when it gets this Attached.
  std::string refusal_of(const std::function<void(Attached&)>& spoil, const PullEnd::Options& options = {}) {
    sockets_ = socket_pair();
    by_hand_.reset();
    Tensors from(2), to(2);
    make_pull(to.wanted(), options);
    Attached attached = attached_of(from);
    spoil(attached);
    send(say_as_source(), std::move(attached));
    settle();
    return pull_status_.message();
  }
  // The message with which a source of two tensors ends when it gets all of these.
  std::string refusal_of(const std::vector<Prepare>& prepares) {
    sockets_ = socket_pair();
    by_hand_.reset();
    Tensors from(2);
    make_source(from.served());
    source_->attach(source_link_->link());
    for (const Prepare& prepare : prepares) say_as_puller().send(prepare);
    settle();
    return source_status_.message();
  }
  // One pull of a slot, and the fill of its stream, if there is one.
  void transfer(uint32_t slot, uint32_t number) {
    pull_->run(slot).start(number);
    if (source_->streams()) {
      source_->run(slot).start(number);
      ASSERT_TRUE(filled_.wait());
      EXPECT_EQ(source_->run(slot).status(), Status());
    }
    ASSERT_TRUE(drained_.wait());
    EXPECT_EQ(pull_->run(slot).status(), Status());
  }

  EventLoop loop_{"exchange-test"};  // not started: the test's thread takes its place
  SocketPair sockets_;
  WorkerPool pull_pool_{1, "test-pull"};
  WorkerPool source_pool_{1, "test-src"};
  SomePacked runs_{exec_testing::own_endpoint().name, pull_pool_, source_pool_};
  Completion drained_, filled_;
  std::optional<SourceEnd> source_;
  std::optional<PullEnd> pull_;
  std::optional<LinkEnd> source_link_, pull_link_, by_hand_;
  Status source_status_, pull_status_;
};

TEST_F(ExchangeTest, TheTwoEndsAgreeAndTheDataArrives) {
  Tensors from(3, 1), to(3);
  make_source(from.served());
  make_pull(to.wanted());
  EXPECT_EQ(pull_->program(), nullptr);
  source_->attach(source_link_->link());
  settle();
  ASSERT_TRUE(source_->ready() && pull_->ready()) << source_status_.message() << pull_status_.message();
  EXPECT_FALSE(source_->streams() || pull_->streams());
  EXPECT_EQ(pull_->slots(), 1U);
  EXPECT_EQ(pull_->bytes(), static_cast<int64_t>(3 * kTensorBytes));
  EXPECT_EQ(source_->bytes(), pull_->bytes());
  transfer(0, 1);
  EXPECT_EQ(to.values(), from.values());
}

TEST_F(ExchangeTest, WhatIsSkippedIsNotMovedAndBothKnow) {
  Tensors from(2, 1), to(2);
  make_source(from.served());
  std::vector<WantedRoute> wanted = to.wanted();
  wanted[1].skipped = wanted[2].skipped = true;
  make_pull(std::move(wanted));
  source_->attach(source_link_->link());
  settle();
  ASSERT_TRUE(source_->ready() && pull_->ready());
  EXPECT_THAT(pull_->pulled(), testing::ElementsAre(0, 3));
  EXPECT_TRUE(!source_->skips(0) && source_->skips(1) && source_->skips(2) && !source_->skips(3));
  EXPECT_EQ(source_->bytes(), static_cast<int64_t>(kTensorBytes));
  EXPECT_EQ(pull_->bytes(), source_->bytes());
  transfer(0, 1);
  EXPECT_EQ(to.values()[0].front(), 1.0f);
  EXPECT_EQ(to.values()[0].back(), Tensors(2).values()[0].back());  // unchanged
}

TEST_F(ExchangeTest, PackedMemoryGoesThroughAStreamSlotBySlot) {
  Tensors to(1);
  std::vector<float> slots(2 * kRows * kColumns);
  std::iota(slots.begin(), slots.end(), 5.0f);
  std::vector<ServedRoute> served = Tensors(1).served();
  for (ServedRoute& one : served) {
    one.route.data = reinterpret_cast<const std::byte*>(slots.data());
    one.slot_bytes = kTensorBytes;
  }
  runs_.packed.insert(served.front().route.data);
  make_source(std::move(served), 2);
  make_pull(to.wanted());
  source_->attach(source_link_->link());
  settle();
  ASSERT_TRUE(source_->ready() && pull_->ready()) << source_status_.message() << pull_status_.message();
  EXPECT_TRUE(source_->streams() && pull_->streams());
  ASSERT_EQ(pull_->slots(), 2U);
  for (const uint32_t slot : {1U, 0U, 1U}) {
    transfer(slot, 7 + slot);
    EXPECT_EQ(to.values()[0].front(), slots[slot * kRows * kColumns]);
    EXPECT_EQ(to.values()[0].back(), slots[(slot + 1) * kRows * kColumns - 1]);
  }
}

TEST_F(ExchangeTest, AnOwnerThatMakesItsOwnRunIsGivenTheStream) {
  Tensors from(1, 1), to(1);
  runs_.packed.insert(from.data(0));
  make_source(from.served());
  make_pull(to.wanted(), {.runs = false});
  source_->attach(source_link_->link());
  settle();
  ASSERT_TRUE(pull_->ready());
  EXPECT_NE(pull_->stream(), nullptr);
}

TEST_F(ExchangeTest, PlacesLieInSharedMemoryToo) {
  const SharedBuffer shared = SharedHeap::process().allocate(2 * kTensorBytes);
  Tensors to(1);
  std::vector<ServedRoute> served = Tensors(1).served();
  for (ServedRoute& one : served) {
    one.route.data = shared.data();
    one.slot_bytes = kTensorBytes;
  }
  auto* const values = reinterpret_cast<float*>(shared.data());
  std::iota(values, values + 2 * kRows * kColumns, 3.0f);
  make_source(std::move(served), 2);
  make_pull(to.wanted());
  source_->attach(source_link_->link());
  settle();
  ASSERT_TRUE(pull_->ready()) << pull_status_.message();
  transfer(1, 1);
  EXPECT_TRUE(std::equal(to.values()[0].begin(), to.values()[0].end(), values + kRows * kColumns));
}

TEST_F(ExchangeTest, KeysMayTakeSeveralMessages) {
  Tensors from(2, 1), to(2);
  make_pull(to.wanted());
  Attached attached = attached_of(from);
  Attached first{.more_keys = true};
  first.keys = std::move(attached.keys);
  attached.keys.clear();
  first.keys.push_back(TransportRegistry::builtin().find("shm")->export_region({}));
  attached.keys.push_back(TransportRegistry::builtin().find("shm")->export_region({}));
  attached.places[1].memory.key = 2;  // the first key of the second message
  send(say_as_source(), std::move(first));
  settle();
  EXPECT_EQ(pull_->program(), nullptr);
  send(say_as_source(), std::move(attached));
  settle();
  ASSERT_NE(pull_->program(), nullptr) << pull_status_.message();
  EXPECT_EQ(pull_->bytes(), static_cast<int64_t>(2 * kTensorBytes));
  EXPECT_FALSE(pull_->ready());
}

TEST_F(ExchangeTest, APullerRefusesPlacesThatDoNotFit) {
  EXPECT_THAT(refusal_of([](Attached& attached) { attached.places.pop_back(); }),
              HasSubstr("places for 1 tensors, more are needed"));
  EXPECT_THAT(refusal_of([](Attached& attached) { attached.places.push_back(attached.places.back()); }),
              HasSubstr("places for 3 tensors where 2 are needed"));
  EXPECT_THAT(refusal_of([](Attached& attached) { attached.places[1].strides.pop_back(); }),
              HasSubstr("a place of 1 dims for a tensor of 2"));
  EXPECT_THAT(refusal_of([](Attached& attached) { attached.places[0].strides[0] *= 2; }),
              HasSubstr("leave its memory"));
  EXPECT_THAT(refusal_of([](Attached& attached) { attached.places[1].origin = 4; }), HasSubstr("leave its memory"));
  EXPECT_THAT(refusal_of([](Attached& attached) { attached.places[0].delta = attached.places[0].memory; }),
              HasSubstr("tensor 0: a place with a delta"));
  EXPECT_THAT(refusal_of([](Attached&) {}, {.deltas = true}), HasSubstr("tensor 0: a place without a delta"));
  EXPECT_THAT(refusal_of([](Attached& attached) {
                attached.slots = 3;
                attached.places[1].slot_bytes = UINT64_MAX / 2;
              }),
              HasSubstr("slots of"));
}

TEST_F(ExchangeTest, APullerRefusesKeysThatDoNotFit) {
  EXPECT_THAT(refusal_of([](Attached& attached) { attached.keys.clear(); }), HasSubstr("key 0 was never given"));
  EXPECT_THAT(refusal_of([](Attached& attached) { attached.places[1].memory.key = 1; }),
              HasSubstr("key 1 was never given"));
  EXPECT_THAT(refusal_of([](Attached& attached) { attached.keys[0].transport = "pigeons"; }),
              HasSubstr("which is unknown here"));
  EXPECT_THAT(refusal_of([](Attached& attached) { attached.keys[0].fds.resize(1); }),
              HasSubstr("1 keys with 0 descriptors, they have 1"));
  EXPECT_THAT(refusal_of([](Attached& attached) {
                const SharedBuffer shared = SharedHeap::process().allocate(64);
                attached.keys[0] =
                    TransportRegistry::builtin().find("shm")->export_region({.data = shared.data(), .bytes = 64});
                attached.places[0].memory.offset = UINT64_MAX / 4;
              }),
              HasSubstr("leave arena"));
  EXPECT_THAT(refusal_of([](Attached& attached) {
                attached.more_keys = true;
                while (attached.keys.size() < kMaxKeys) attached.keys.push_back(attached.keys[0].duplicate());
              }),
              "");  // this many are allowed
  Attached one_more{.more_keys = true};
  one_more.keys.resize(1);
  send(say_as_source(), std::move(one_more));
  settle();
  EXPECT_THAT(pull_status_.message(), HasSubstr("16384 keys and 1 more, at most 16384"));
}

TEST_F(ExchangeTest, APullerRefusesWhatIsOutOfTurn) {
  const auto after = [&](bool attached, const std::function<void(Link&)>& say) {
    sockets_ = socket_pair();
    by_hand_.reset();
    Tensors from(1), to(1);
    make_pull(to.wanted());
    if (attached) send(say_as_source(), attached_of(from));
    say(say_as_source());
    settle();
    return pull_status_.message();
  };
  EXPECT_THAT(after(false, [](Link& link) { link.send(Prepared{}); }), HasSubstr("Prepared out of turn"));
  EXPECT_THAT(after(true, [](Link& link) { link.send(Attached{}); }), HasSubstr("Attached out of turn"));
  EXPECT_THAT(after(true,
                    [](Link& link) {
                      link.send(Prepared{});
                      link.send(Prepared{});
                    }),
              HasSubstr("Prepared out of turn"));
  EXPECT_THAT(after(true,
                    [](Link& link) {
                      std::vector<UniqueFd> fds;
                      fds.push_back(std::move(socket_pair().first));
                      link.send(Prepared{}, std::move(fds));
                    }),
              HasSubstr("Prepared with 1 descriptors"));
  EXPECT_THAT(after(true, [](Link& link) { link.send(Prepared{.transport = "shm"}); }),
              HasSubstr("Prepared with 0 descriptors of \"shm\""));
}

TEST_F(ExchangeTest, APullerRefusesAStreamThatIsNone) {
  const auto ended_by = [&](const std::string& transport, bool with_socket) {
    sockets_ = socket_pair();
    by_hand_.reset();
    Tensors from(1), to(1);
    make_pull(to.wanted());
    Attached attached = attached_of(from);
    attached.keys[0] = TransportRegistry::builtin().find("shm")->export_region({.packed = true});
    send(say_as_source(), std::move(attached));
    std::vector<UniqueFd> fds;
    if (with_socket) fds.push_back(std::move(socket_pair().first));
    say_as_source().send(Prepared{.transport = transport}, std::move(fds));
    settle();
    return pull_status_.message();
  };
  EXPECT_THAT(ended_by("shm", false), HasSubstr("Prepared with 0 descriptors"));
  EXPECT_THAT(ended_by("", true), HasSubstr("Prepared with 1 descriptors of \"\""));
  EXPECT_THAT(ended_by("shm", true), HasSubstr("bounce ring"));
  EXPECT_THAT(ended_by("loopback", true), HasSubstr("\"loopback\" has none"));
  EXPECT_THAT(ended_by("pigeons", true), HasSubstr("\"pigeons\" has none"));
}

TEST_F(ExchangeTest, ASourceRefusesWhatDoesNotFitItsRoutes) {
  EXPECT_EQ(refusal_of({Prepare{.stream = false, .skipped = {0, 3}}}), "");
  EXPECT_TRUE(source_->ready());
  EXPECT_THAT(refusal_of({Prepare{.stream = false, .skipped = {0, 4}}}), HasSubstr("Prepare skips route 4 of 4"));
  EXPECT_THAT(refusal_of({Prepare{}, Prepare{}}), HasSubstr("Prepare came twice"));
  EXPECT_THAT(refusal_of({Prepare{.stream = true, .skipped = {}}}), HasSubstr("nothing here is private"));
}

}  // namespace
}  // namespace tessera
