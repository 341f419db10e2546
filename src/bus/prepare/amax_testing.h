// For tests of AmaxExchange: one exchange, and peers that a test scripts.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <future>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/socket.h"
#include "base/testing.h"
#include "bus/prepare/amax_exchange.h"
#include "peer/exchange/messages.h"
#include "peer/raw_link_testing.h"
#include "tessera/version.h"

namespace tessera::bus {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline const AmaxKey kMatrix{.group = 0, .matrix = 0};
inline const AmaxKey kCutBlock{.group = 0, .matrix = 0, .row = 3, .column = 1};
inline const AmaxKey kOtherMatrix{.group = 1, .matrix = 0};

inline SessionSetup quantising_setup(int world) {
  SessionSetup setup;
  setup.batch = "policy";
  setup.view.name = "weights";
  RankRecord record;
  record.incarnation = Incarnation::self();
  record.world = world;
  setup.view.own.assign(static_cast<size_t>(world), record);
  setup.agreement.session = "0123456789abcdef";
  Match::Tensor w;
  w.name = "w";
  w.shape = {4, 8};
  w.wire = Format::kNvfp4;
  Match::Tensor norm;
  norm.name = "norm";
  norm.shape = {8};
  setup.agreement.match.tensors = {w, norm};
  return setup;
}

inline Attach agreeing() {
  return {.pair = "weights",
          .batch = "policy",
          .purpose = Attach::Purpose::kAgree,
          .session = quantising_setup(1).agreement.session};
}

inline Caller calling(std::shared_ptr<Link> link, Rank rank) {
  Hello hello;
  hello.job = "trainer";
  hello.rank = rank;
  hello.incarnation = Incarnation::self();
  return {.link = std::move(link), .hello = std::move(hello), .attach = agreeing()};
}

// The other end of a connection.
class RawMember : public RawLink {
 public:
  using RawLink::RawLink;

  // "version, epoch: 1 2 3", or why there are no amaxes.
  std::string answer() {
    const auto agreed = next<Agreed>();
    if (!agreed.status.ok()) return fmt::format("{}, {}: {}", agreed.version, agreed.epoch, agreed.status.message());
    if (agreed.finding.any()) return fmt::format("{}, {}: a finding", agreed.version, agreed.epoch);
    return fmt::format("{}, {}: {}", agreed.version, agreed.epoch, fmt::join(agreed.amaxes, " "));
  }
};

// An exchange and a record of its callbacks.
class Exchanging {
 public:
  Exchanging(Rank rank, int world, std::vector<AmaxKey> own)
      : agent_({.name_space = "default", .job = "trainer", .rank = rank, .world = world}, 1),
        setup_(quantising_setup(world)) {
    agent_.run_on_loop([&] {
      exchange_.emplace(
          agent_, setup_, own,
          AmaxExchange::Events{.ready_changed =
                                   [this] {
                                     if (exchange_->ready()) ready_.set_value();
                                   },
                               .lost = [this](const Status& status) { lost_.push_back(status.message()); },
                               .agreed =
                                   [this](const Status& status, std::span<const float> amaxes) {
                                     over_.push_back(status.ok() ? fmt::format("{}", fmt::join(amaxes, " "))
                                                                 : fmt::format("{}: {}", to_string(status.code()),
                                                                               status.message()));
                                     if (on_over_) on_over_();
                                   }});
    });
  }
  ~Exchanging() {
    agent_.run_on_loop([this] { exchange_.reset(); });
  }

  Agent& agent() { return agent_; }
  void start(int64_t version, std::vector<float> amaxes, const NonfiniteFinding& finding = {}) {
    with([&](AmaxExchange& exchange) { exchange.start(version, amaxes, finding); });
  }
  template <typename Call>
  void with(Call call) {
    agent_.run_on_loop([&] { call(*exchange_); });
  }
  // What has been agreed since the last call, or the errors.
  std::vector<std::string> over() {
    std::vector<std::string> over;
    agent_.run_on_loop([&] { over.swap(over_); });
    return over;
  }
  std::vector<std::string> lost() {
    std::vector<std::string> lost;
    agent_.run_on_loop([&] { lost.swap(lost_); });
    return lost;
  }
  std::vector<std::string> waiting_for() {
    std::vector<std::string> names;
    with([&](AmaxExchange& exchange) { names = exchange.waiting_for(); });
    return names;
  }
  void wait_ready() { ready_.get_future().wait(); }
  void on_over(std::function<void()> call) {
    agent_.run_on_loop([&] { on_over_ = std::move(call); });
  }

 private:
  Agent agent_;
  const SessionSetup setup_;
  std::optional<AmaxExchange> exchange_;
  std::vector<std::string> over_, lost_;
  std::function<void()> on_over_;
  std::promise<void> ready_;
};

// Rank 0 and members: member 1 joins a block of the matrix and the matrix, member 2 the matrix.
struct Star {
  Star() {
    join(1, {kCutBlock, kMatrix});
    join(2, {kMatrix});
  }
  explicit Star(std::vector<AmaxKey> own) : zero_(0, 3, std::move(own)) {}
  void join(Rank rank, const std::vector<AmaxKey>& keys) {
    auto [ours, theirs] = socket_pair();
    zero_.with([&](AmaxExchange& exchange) {
      std::shared_ptr<Link> link = Link::adopt(zero_.agent().loop(), std::move(ours), fmt::format("trainer/{}", rank));
      link->set_limits({.payload_bytes = kMaxMessageBytes, .fds = 0});
      links_[rank] = link;
      exchange.accept(calling(link, rank));
    });
    auto& raw = members_.emplace(rank, RawMember(std::move(theirs))).first->second;
    (void)raw.next<Prepared>();
    raw.send(Joins{keys});
    zero_.with([&](AmaxExchange&) { links_.at(rank)->poll(); });
  }
  // Sends it, and returns once rank 0 has seen it.
  void say(Rank rank, const Amaxes& amaxes) {
    members_.at(rank).send(amaxes);
    zero_.with([&](AmaxExchange&) { links_.at(rank)->poll(); });
  }
  void tell(Rank rank, int64_t version, uint32_t epoch, std::vector<float> amaxes) {
    say(rank, {.version = version, .epoch = epoch, .amaxes = std::move(amaxes)});
  }
  RawMember& member(Rank rank) { return members_.at(rank); }
  void let_all_agree(int64_t version, uint32_t epoch) {
    zero_.start(version, {0, 0, 0});
    tell(1, version, epoch, {2, 1});
    tell(2, version, epoch, {3});
    EXPECT_THAT(zero_.over(), testing::ElementsAre("0 3 0"));
    EXPECT_EQ(member(1).answer(), fmt::format("{}, {}: 2 3", version, epoch));
    EXPECT_EQ(member(2).answer(), fmt::format("{}, {}: 3", version, epoch));
  }

  Exchanging zero_{0, 3, {kOtherMatrix, kMatrix, kOtherMatrix}};
  std::map<Rank, RawMember> members_;
  std::map<Rank, std::shared_ptr<Link>> links_;
};

}  // namespace tessera::bus
