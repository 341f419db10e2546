#include "bus/registration/batch_exchange.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "base/message.h"
#include "base/mutex.h"
#include "base/thread.h"
#include "peer/wait_list.h"
#include "store/test_util.h"

namespace tessera::bus {
namespace {

constexpr Duration kLimit = seconds(30);
constexpr const char* kBatch = "policy";

Manifest manifest_with(const char* layout) {
  return {{{.name = "w", .dtype = DType::kF32, .shape = {8, 4}, .layout = Layout::parse(layout)}}};
}

// One rank, as if it were a separate process.
class Member {
 public:
  Member(const std::string& store, const std::string& job, Rank rank, int world, const std::string& peer, bool sends)
      : store_(open_store(store)),
        rendezvous_(*store_, {.name_space = "test", .job = job, .rank = rank, .world = world},
                    {.incarnation = Incarnation::next(),
                     .world = world,
                     .address = "/nowhere",
                     .release = "test",
                     .worker = {}},
                    waits_, loop_),
        exchange_(rendezvous_, "weights", peer, kBatch),
        world_(static_cast<size_t>(world)),
        peer_(peer),
        sends_(sends),
        manifest_(std::make_shared<const Manifest>(manifest_with(world == 1 ? "1:R" : "2:S0"))) {
    loop_.start();
    rendezvous_.claim(limits());
  }

  void join() { view_ = rendezvous_.join("weights", peer_, limits()); }
  Agreement exchange() { return exchange_.exchange(view_, {.sends = sends_, .manifest = manifest_}, limits()); }
  std::vector<std::string> all_gather(const std::string& value) { return exchange_.all_gather(view_, value, limits()); }
  size_t world() const { return world_; }
  void retract() { exchange_.retract(); }
  void withdraw() { exchange_.withdraw(); }

  // Registers as a meeting does, but without connections: until all ranks have read the same.
  std::string agree(std::span<const std::unique_ptr<Member>> all) {
    while (true) {
      const Agreement agreement = exchange();
      std::atomic<bool> over = false;
      const auto end = [&over](const auto&...) { over = true; };
      const auto watch = exchange_.watch(view_, agreement, end, end);
      set_session(agreement.session);
      const auto same = [&](const auto& other) { return other->session() == agreement.session; };
      const Deadline deadline = Deadline::after(kLimit);
      while (!over) {
        if (std::ranges::all_of(all, same)) return agreement.session;
        if (deadline.passed()) fail(ErrorCode::kDeadlineExceeded, "the others have another session"_message);
        std::this_thread::yield();
      }
    }
  }
  std::string session() const {
    const MutexLock lock(mutex_);
    return session_;
  }
  void set_session(const std::string& session) {
    const MutexLock lock(mutex_);
    session_ = session;
  }

 private:
  static CallLimits limits() { return {.deadline = Deadline::after(kLimit), .stop = {}}; }

  std::unique_ptr<Store> store_;
  WaitList waits_;
  EventLoop loop_{"test"};
  Rendezvous rendezvous_;
  BatchExchange exchange_;
  const size_t world_;
  const std::string peer_;
  const bool sends_;
  const std::shared_ptr<const Manifest> manifest_;
  PairView view_;
  mutable Mutex mutex_;
  std::string session_;
};

class BatchExchangeTest : public testing::Test {
 protected:
  BatchExchangeTest() {
    for (Rank rank = 0; rank < 2; ++rank)
      members_.push_back(std::make_unique<Member>(server_->address(), "trainer", rank, 2, "evaluation", true));
    members_.push_back(std::make_unique<Member>(server_->address(), "evaluation", 0, 1, "trainer", false));
    each([](Member& member) { member.join(); });
  }

  template <class Action>
  void each(const Action& action) {
    std::vector<std::thread> threads;
    for (const auto& member : members_)
      threads.push_back(start_thread("member", [&] {
        try {
          action(*member);
        } catch (const Error& error) {
          ADD_FAILURE() << error.what();
        }
      }));
    for (std::thread& thread : threads) thread.join();
  }

  // All ranks again, from any state.
  std::string agree() {
    std::set<std::string> sessions;
    Mutex mutex;
    each([&](Member& member) {
      const std::string session = member.agree(members_);
      const MutexLock lock(mutex);
      sessions.insert(session);
    });
    EXPECT_EQ(sessions.size(), 1u);
    for (const auto& member : members_) member->set_session({});
    return sessions.empty() ? std::string() : *sessions.begin();
  }

  std::unique_ptr<store::Server> server_ = store::tcp_server();
  std::vector<std::unique_ptr<Member>> members_;  // trainer/0, trainer/1, evaluation/0
};

TEST_F(BatchExchangeTest, AllRanksReadOneSession) {
  const std::string first = agree();
  EXPECT_EQ(agree(), first) << "a registration that was not taken back stands";
  for (const auto& member : members_) member->withdraw();
  EXPECT_NE(agree(), first);
}

TEST_F(BatchExchangeTest, GathersWhatIsSaidOfThisRegistrationAndOfNoEarlierOne) {
  for (int round = 0; round < 10; ++round) {
    const std::string words = "round " + std::to_string(round);
    each([&](Member& member) {
      const std::vector<std::string> said = member.all_gather(words);
      EXPECT_EQ(said, std::vector<std::string>(member.world(), words));
      (void)member.agree(members_);
    });
    for (const auto& member : members_) {
      member->set_session({});
      member->withdraw();
      member->retract();
    }
  }
}

// A rank that was attached withdraws its registration once that is lost; one that was not yet attached does not. Ranks
// that begin again have read what it published, and do not build on it.
TEST_F(BatchExchangeTest, ARegistrationThatOthersHaveLeftBehindIsRenewed) {
  for (size_t kept = 0; kept < members_.size(); ++kept) {
    const std::string before = agree();
    for (size_t i = 0; i < members_.size(); ++i)
      if (i != kept) members_[i]->withdraw();
    EXPECT_NE(agree(), before) << "member " << kept << " kept its own";
  }
}

TEST_F(BatchExchangeTest, RanksAgreeWhicheverOfThemBeginsAgainAndWhenever) {
  std::mt19937 random(1);
  for (int round = 0; round < 40; ++round) {
    std::vector<bool> early, late;
    for (size_t i = 0; i < members_.size(); ++i) {
      early.push_back(random() % 2 == 0);
      late.push_back(random() % 2 == 0);
    }
    for (size_t i = 0; i < members_.size(); ++i)
      if (early[i]) members_[i]->withdraw();
    std::atomic<size_t> next = 0;
    each([&](Member& member) {
      if (late[next++]) member.withdraw();
      (void)member.agree(members_);
    });
    for (const auto& member : members_) member->set_session({});
    ASSERT_FALSE(HasFailure());
  }
}

}  // namespace
}  // namespace tessera::bus
