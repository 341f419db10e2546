// The state machine against a naive model that keeps every change and replays them.
#include "store/memory/state.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>

#include "base/fail.h"
#include "store/limits.h"

namespace tessera::store {
namespace {

constexpr LeaseId kLeases = 4;

StoreOperation put(std::string key, std::string value, LeaseId lease = kNoLease) {
  return {.type = StoreOperation::Type::kPut,
          .key = std::move(key),
          .value = std::move(value),
          .options = {.lease = lease}};
}

StoreOperation remove(std::string key) {
  return {.type = StoreOperation::Type::kDelete, .key = std::move(key), .value = {}, .options = {}};
}

class Model {
 public:
  struct Change {
    int64_t revision;
    std::string key;
    std::optional<std::string> value;  // nothing: deleted
    LeaseId lease;
  };

  // The full state of a key, from the whole log.
  std::optional<KeyValue> get(const std::string& key) const {
    std::optional<KeyValue> found;
    for (const Change& change : log_) {
      if (change.key != key) continue;
      if (!change.value) {
        found.reset();
        continue;
      }
      if (!found) found = KeyValue{.key = key, .create_revision = change.revision};
      found->value = *change.value;
      found->mod_revision = change.revision;
      found->version += 1;
      found->lease = change.lease;
    }
    return found;
  }
  std::set<std::string> keys() const {
    std::set<std::string> keys;
    for (const Change& change : log_)
      if (get(change.key)) keys.insert(change.key);
    return keys;
  }
  bool holds(const StoreTransaction& transaction) const {
    return std::ranges::all_of(transaction.compares, [&](const StoreCompare& compare) {
      const auto kv = get(compare.key);
      return (kv ? kv->mod_revision : 0) == compare.mod_revision;
    });
  }
  void apply(const std::vector<StoreOperation>& operations) {
    std::vector<Change> changes;
    for (const StoreOperation& operation : operations) {
      const bool deletes = operation.type == StoreOperation::Type::kDelete;
      if (deletes && !get(operation.key)) continue;
      changes.push_back({revision_ + 1, operation.key, deletes ? std::nullopt : std::optional(operation.value),
                         operation.options.lease});
    }
    if (changes.empty()) return;
    ++revision_;
    log_.insert(log_.end(), changes.begin(), changes.end());
  }
  void remove_if(const std::function<bool(const KeyValue&)>& condition) {
    std::vector<StoreOperation> operations;
    for (const std::string& key : keys())
      if (condition(*get(key))) operations.push_back(remove(key));
    apply(operations);
  }
  void end_lease(LeaseId lease) {
    remove_if([&](const KeyValue& kv) { return kv.lease == lease; });
    expiries.erase(lease);
  }
  void expire(TimePoint now) {
    while (true) {
      std::optional<std::pair<TimePoint, LeaseId>> next;
      for (const auto& [lease, expiry] : expiries)
        if (expiry <= now && (!next || std::pair(expiry, lease) < *next)) next = {expiry, lease};
      if (!next) return;
      end_lease(next->second);
    }
  }
  int64_t revision() const { return revision_; }
  const std::vector<Change>& log() const { return log_; }

  std::map<LeaseId, TimePoint> expiries;

 private:
  int64_t revision_ = 0;
  std::vector<Change> log_;
};

bool same(const Event& event, const Model::Change& change) {
  const bool deleted = event.type == StoreEvent::Type::kDelete;
  return event.revision() == change.revision && event.kv->key == change.key && deleted == !change.value &&
         (deleted || event.kv->value == *change.value);
}

class StateModelTest : public testing::TestWithParam<unsigned> {
 protected:
  std::string random_key() { return fmt::format("{}/{}", "ab"[random_() % 2], random_() % 4); }
  LeaseId random_lease() { return static_cast<LeaseId>(1 + random_() % kLeases); }
  unsigned roll(unsigned sides) { return static_cast<unsigned>(random_() % sides); }

  StoreTransaction random_transaction() {
    StoreTransaction transaction;
    for (unsigned i = roll(3); i > 0; --i) {
      const std::string key = random_key();
      const auto kv = model_.get(key);
      const int64_t right = kv ? kv->mod_revision : 0;
      transaction.compares.push_back({.key = key, .mod_revision = roll(4) == 0 ? right + 1 : right});
    }
    std::set<std::string> used;
    for (unsigned i = roll(4); i > 0; --i) {
      const std::string key = random_key();
      if (!used.insert(key).second) continue;
      const LeaseId lease = roll(2) == 0 ? random_lease() : kNoLease;
      if (roll(3) == 0) {
        transaction.operations.push_back(remove(key));
      } else {
        transaction.operations.push_back(put(key, fmt::format("v{}", roll(1000)), lease));
      }
    }
    return transaction;
  }

  bool leases_exist(const StoreTransaction& transaction) const {
    return std::ranges::all_of(transaction.operations, [&](const StoreOperation& operation) {
      return operation.options.lease == kNoLease || model_.expiries.contains(operation.options.lease);
    });
  }

  void transact() {
    const StoreTransaction transaction = random_transaction();
    if (model_.holds(transaction) && !leases_exist(transaction)) {
      EXPECT_THROW(state_.transact(transaction), Error);
      return;
    }
    const State::Outcome outcome = state_.transact(transaction);
    ASSERT_EQ(outcome.succeeded, model_.holds(transaction));
    if (outcome.succeeded) model_.apply(transaction.operations);
  }

  void step() {
    switch (roll(8)) {
      case 0: {
        const std::string key = random_key();
        ASSERT_EQ(state_.erase(key), model_.get(key) ? 1U : 0U);
        return model_.apply({remove(key)});
      }
      case 1: {
        if (roll(4) != 0) return;
        const std::string prefix = roll(2) == 0 ? "a/" : "b/1";
        state_.erase_prefix(prefix);
        return model_.remove_if([&](const KeyValue& kv) { return kv.key.starts_with(prefix); });
      }
      case 2: {
        const LeaseId lease = random_lease();
        const Duration ttl = seconds(1 + roll(5));
        state_.grant(lease, ttl, now_);
        ttls_[lease] = ttl;
        model_.expiries[lease] = now_ + ttl;
        return;
      }
      case 3: {
        const LeaseId lease = random_lease();
        const bool known = model_.expiries.contains(lease);
        ASSERT_EQ(state_.keep_alive(lease, now_), known);
        if (known) model_.expiries[lease] = now_ + ttls_[lease];
        return;
      }
      case 4: {
        const LeaseId lease = random_lease();
        if (roll(3) != 0 || !model_.expiries.contains(lease)) return;
        state_.revoke(lease);
        return model_.end_lease(lease);
      }
      case 5: {
        now_ += seconds(roll(3));
        state_.expire(now_);
        return model_.expire(now_);
      }
      default:
        return transact();
    }
  }

  void check() {
    ASSERT_EQ(state_.revision(), model_.revision());
    std::vector<Record> all = state_.find_prefix("");
    const std::set<std::string> keys = model_.keys();
    ASSERT_EQ(all.size(), keys.size());
    for (const Record& record : all) ASSERT_EQ(*record, model_.get(record->key));
    ASSERT_EQ(seen_.size(), model_.log().size());
    ASSERT_TRUE(std::ranges::equal(seen_, model_.log(), same));
    ASSERT_EQ(state_.next_expiry().has_value(), !model_.expiries.empty());

    ASSERT_LE(state_.compacted(), state_.revision());
    const int64_t span = state_.revision() - state_.compacted();
    const int64_t from = state_.compacted() + 1 + static_cast<int64_t>(random_() % static_cast<uint64_t>(span + 1));
    std::vector<Model::Change> expected;
    for (const Model::Change& change : model_.log())
      if (change.revision >= from && change.key.starts_with("a/")) expected.push_back(change);
    ASSERT_TRUE(std::ranges::equal(state_.events_from(from, "a/"), expected, same));
  }

  std::mt19937 random_{GetParam()};
  TimePoint now_{};
  std::vector<Event> seen_;
  State state_{State::Limits{.history_events = 20, .history_bytes = 400},
               [this](std::span<const Event> events) { seen_.insert(seen_.end(), events.begin(), events.end()); }};
  std::map<LeaseId, Duration> ttls_;
  Model model_;
};

TEST_P(StateModelTest, BehavesAsTheModelDoes) {
  for (int i = 0; i < 250; ++i) {
    ASSERT_NO_FATAL_FAILURE(step());
    ASSERT_NO_FATAL_FAILURE(check());
  }
  EXPECT_GT(state_.compacted(), 0) << "the case never came to compaction";
}

INSTANTIATE_TEST_SUITE_P(Seeds, StateModelTest, testing::Range(1U, 25U));

TEST(StateTest, ATransactionThatChangesNothingTakesNoRevision) {
  State state({});
  state.transact({.compares = {}, .operations = {remove("a")}});
  state.transact({.compares = {{.key = "a", .mod_revision = 0}}, .operations = {}});
  EXPECT_EQ(state.erase("a"), 0U);
  EXPECT_EQ(state.revision(), 0);
}

TEST(StateTest, AFailedTransactionShowsWhatStoodInItsWay) {
  State state({});
  state.transact({.compares = {}, .operations = {put("a", "1")}});
  const auto outcome = state.transact({.compares = {{.key = "a"}, {.key = "b"}}, .operations = {put("b", "2")}});
  EXPECT_FALSE(outcome.succeeded);
  ASSERT_EQ(outcome.current.size(), 1U);
  EXPECT_EQ(outcome.current[0]->value, "1");
  EXPECT_EQ(state.find("b"), nullptr);
}

TEST(StateTest, ASilentRestoreKeepsRevisionsAndTellsNobody) {
  int events = 0;
  State state({}, [&](std::span<const Event>) { ++events; });
  state.raise_revision(900);
  const KeyValue kv{.key = "a", .value = "1", .create_revision = 7, .mod_revision = 9, .version = 2, .decision = true};
  state.restore(kv, true);
  EXPECT_EQ(*state.find("a"), kv);
  EXPECT_EQ(events, 0);
  EXPECT_EQ(state.revision(), kRevisionsPerStore);
  EXPECT_EQ(state.compacted(), state.revision());
}

TEST(StateTest, OfSeveralRestoredTheLatestStandsInAnyOrder) {
  const KeyValue early{.key = "a", .value = "early", .create_revision = 1, .mod_revision = 5, .version = 1};
  const KeyValue late{.key = "a", .value = "late", .create_revision = 1, .mod_revision = 8, .version = 2};
  for (const bool silent : {true, false}) {
    for (const bool in_order : {true, false}) {
      State state({});
      state.raise_revision(100);
      state.restore(in_order ? early : late, silent);
      state.restore(in_order ? late : early, silent);
      EXPECT_EQ(state.find("a")->value, "late");
    }
  }
}

TEST(StateTest, WhatWasWrittenHereOutranksWhatIsRestored) {
  State state({});
  state.transact({.compares = {}, .operations = {put("a", "here")}});
  state.restore({.key = "a", .value = "before", .create_revision = 1, .mod_revision = 99, .version = 1}, false);
  EXPECT_EQ(state.find("a")->value, "here");
}

TEST(StateTest, ARestoredKeyThatClaimsMoreThanTheStoreHasReachedIsANewChange) {
  State state({});
  state.raise_revision(100);
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const KeyValue sound{.key = "a", .create_revision = 7, .mod_revision = 9, .version = 2};
  for (const auto& [field, value] : {std::pair(&KeyValue::mod_revision, kMost),
                                     {&KeyValue::create_revision, int64_t{10}},
                                     {&KeyValue::version, kMost}}) {
    KeyValue false_claim = sound;
    false_claim.key = fmt::format("a{}", state.revision());
    false_claim.*field = value;
    state.restore(false_claim, true);
    const Record stands = state.find(false_claim.key);
    EXPECT_EQ(stands->mod_revision, state.revision());
    EXPECT_EQ(stands->version, 1);
  }
}

TEST(StateTest, AKeyOfALeaseThatNobodyHasIsNotRestored) {
  State state({});
  EXPECT_THROW(state.restore({.key = "a", .mod_revision = 1, .version = 1, .lease = 5}, true), Error);
  EXPECT_EQ(state.find("a"), nullptr);
}

TEST(StateTest, ARevisionIsForgottenAsAWhole) {
  State state(State::Limits{.history_events = 3});
  state.transact({.compares = {}, .operations = {put("a", "1"), put("b", "1")}});
  state.transact({.compares = {}, .operations = {put("c", "1"), put("d", "1")}});
  EXPECT_EQ(state.compacted(), 1);
  EXPECT_EQ(state.events_from(2, "").size(), 2U);
}

TEST(LimitsTest, WhatIsTooMuchIsRefusedByName) {
  EXPECT_THROW(check_key(""), Error);
  EXPECT_THROW(check_key(std::string(kMaxStoreKeyBytes + 1, 'k')), Error);
  EXPECT_NO_THROW(check_key(std::string(kMaxStoreKeyBytes, 'k')));
  EXPECT_THROW(check_ttl(Duration::zero()), Error);
  EXPECT_THROW(check_transaction({.compares = {}, .operations = {put("a", "1"), remove("a")}}), Error);
  EXPECT_THROW(check_transaction({.compares = {}, .operations = {put("a", std::string(kMaxStoreValueBytes + 1, 'v'))}}),
               Error);
  EXPECT_THROW(check_transaction(
                   {.compares = std::vector<StoreCompare>(kMaxTransactionItems + 1, {.key = "a"}), .operations = {}}),
               Error);
}

}  // namespace
}  // namespace tessera::store
