// Random calls of a BufferCache, with captures and below caps, beside a model of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "etp/schedule/cache_testing.h"
#include "tessera/error.h"

namespace tessera::etp {
namespace {

// A cache beside a model that knows who holds what.
class RandomUse {
 public:
  explicit RandomUse(unsigned seed, std::optional<int64_t> cap = {})
      : random_(seed), cap_(cap), cache_(arena_.memory(), cap) {}

  void run(int calls) {
    for (int i = 0; i < calls && !testing::Test::HasFatalFailure(); ++i) {
      call();
      check();
    }
  }

 private:
  struct User {
    BufferTicket ticket;
    BufferKey key;
    std::byte* memory = nullptr;    // while it holds one
    std::byte* captured = nullptr;  // where it is captured
  };

  size_t below(size_t n) { return random_() % n; }

  void call() {
    const size_t what = below(24);
    if (users_.empty() || what < 2) {
      const BufferKey key = key_of(16 * static_cast<int64_t>(1 + below(3)), static_cast<Chain>(below(2)));
      users_.push_back({cache_.reserve(key, "w" + std::to_string(below(4))), key});
    } else if (what < 10) {
      get(users_[below(users_.size())]);
    } else if (what < 17) {
      User& user = users_[below(users_.size())];
      ASSERT_EQ(cache_.holds(user.ticket), user.memory != nullptr);
      if (user.memory == nullptr) return;
      last_[user.memory] = std::make_shared<int>(0);
      cache_.release(user.ticket, last_[user.memory]);
      user.memory = nullptr;
    } else if (what < 19) {
      cache_.end_step();
    } else if (what < 20) {
      below(2) == 0 ? clear() : move_graphed();
    } else if (what < 22) {
      capture(users_[below(users_.size())]);
    } else {
      User& user = users_[below(users_.size())];
      cache_.uncapture(user.ticket);
      user.captured = nullptr;
    }
    forget_freed();
  }

  void get(User& user) {
    if (user.captured != nullptr && user.memory == nullptr && is_held(user.captured)) {
      ASSERT_FALSE(cache_.is_free(user.ticket));
      ASSERT_THROW(cache_.get(user.ticket), Error);
      return;
    }
    LentBuffer lent{};
    below_cap(user, [&] { lent = cache_.get(user.ticket); });
    if (user.captured != nullptr) {
      ASSERT_EQ(lent.memory, user.captured);
    } else if (user.memory == nullptr) {
      ASSERT_FALSE(is_captured(lent.memory));
    }
    take(user, lent);
  }

  void capture(User& user) {
    if (user.captured != nullptr) return;
    const bool has_captured = std::ranges::any_of(users_, [&](const User& other) {
      return other.key == user.key && other.captured != nullptr && !is_held(other.captured);
    });
    const bool held = user.memory != nullptr;
    LentBuffer lent{};
    below_cap(user, [&] { lent = cache_.capture(user.ticket); });
    if (has_captured && !held) {
      ASSERT_TRUE(is_captured(lent.memory));
    }
    take(user, lent);
    user.captured = lent.memory;
  }

  // All that is left above the cap after such a call is held or captured, or in a capture pool.
  void below_cap(const User& user, const std::function<void()>& call) {
    const int64_t kept = kept_bytes();
    const int64_t before = arena_.bytes();
    call();
    if (cap_ && !has_pool_ && arena_.bytes() > std::max(*cap_, before)) {
      ASSERT_EQ(arena_.bytes(), kept + user.key.bytes());
    }
    forget_freed();
  }

  void take(User& user, const LentBuffer& lent) {
    ASSERT_EQ(lent.bytes, user.key.bytes());
    if (user.memory != nullptr) {
      ASSERT_EQ(lent.memory, user.memory);
    } else {
      ASSERT_EQ(lent.wait_for, last_[lent.memory]);
      user.memory = lent.memory;
    }
  }

  bool is_held(const std::byte* memory) const { return std::ranges::count(users_, memory, &User::memory) > 0; }
  bool is_captured(const std::byte* memory) const { return std::ranges::count(users_, memory, &User::captured) > 0; }
  void clear() {
    cache_.clear();
    for (User& user : users_) user.captured = nullptr;
  }

  void move_graphed() {
    const bool held = std::ranges::any_of(users_, [](const User& u) {
      return (u.memory != nullptr || u.captured != nullptr) && u.key.chain == Chain::kGraphed;
    });
    if (held) {
      EXPECT_THROW(cache_.reallocate(arena_.memory()), Error);
      return;
    }
    cache_.reallocate(arena_.memory());
    has_pool_ = true;
  }
  // Addresses may come again, as new memory.
  void forget_freed() {
    for (std::byte* const memory : arena_.freed) {
      EXPECT_FALSE(is_held(memory) || is_captured(memory));
      last_.erase(memory);
    }
    arena_.freed.clear();
  }

  int64_t kept_bytes() const {
    std::map<const std::byte*, int64_t> kept;
    for (const User& user : users_)
      for (const std::byte* const memory : {user.memory, user.captured})
        if (memory != nullptr) kept.emplace(memory, user.key.bytes());
    return std::accumulate(kept.begin(), kept.end(), int64_t{0},
                           [](int64_t sum, const auto& buffer) { return sum + buffer.second; });
  }

  void check() {
    std::map<std::byte*, int64_t> held;
    int64_t held_bytes = 0;
    std::map<std::byte*, int64_t> captured;
    for (const User& user : users_) {
      if (user.captured != nullptr) {
        ASSERT_TRUE(arena_.owns(user.captured));
        captured.emplace(user.captured, user.key.bytes());
      }
      if (user.memory == nullptr) continue;
      ASSERT_TRUE(arena_.owns(user.memory));
      ASSERT_TRUE(held.emplace(user.memory, user.key.bytes()).second) << "two users share a buffer";
      held_bytes += user.key.bytes();
    }
    const std::byte* end = nullptr;
    for (const auto& [memory, bytes] : held) {
      ASSERT_LE(end, memory);
      ASSERT_EQ(reinterpret_cast<uintptr_t>(memory) % 64, 0U);
      end = memory + bytes;
    }
    const CacheReport report = cache_.report();
    ASSERT_EQ(report.held_bytes, held_bytes);
    ASSERT_EQ(cache_.kept_bytes(), kept_bytes());
    if (report.over_cap == 0) {
      ASSERT_LE(report.most_bytes, cap_.value_or(report.most_bytes));
    }
    int64_t captured_bytes = 0;
    for (const auto& [memory, bytes] : captured) captured_bytes += bytes;
    ASSERT_EQ(report.captured_bytes, captured_bytes);
    ASSERT_EQ(report.bytes, arena_.bytes());
    ASSERT_EQ(report.chain_bytes[0] + report.chain_bytes[1], report.bytes);
    ASSERT_EQ(report.allocations - report.frees, static_cast<int64_t>(arena_.buffers()));
    int64_t of_weights = 0;
    for (const CacheReport::Weight& weight : report.weights) of_weights += weight.held_bytes;
    int64_t of_pools = 0;
    for (const CacheReport::Pool& pool : report.pools) of_pools += pool.bytes;
    ASSERT_EQ(of_weights, held_bytes);
    ASSERT_EQ(of_pools, report.bytes);
  }

  std::mt19937 random_;
  std::optional<int64_t> cap_;
  bool has_pool_ = false;  // then idle buffers may stay above the cap
  Arena arena_;
  BufferCache cache_;
  std::vector<User> users_;
  std::map<std::byte*, LastReader> last_;
};

TEST(Cache, NoTwoUsersShareBytesWhateverHappens) {
  for (unsigned seed = 0; seed < 30; ++seed) {
    SCOPED_TRACE(seed);
    RandomUse(seed).run(400);
    RandomUse(seed, static_cast<int64_t>(seed) * 128).run(400);
    if (testing::Test::HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace tessera::etp
