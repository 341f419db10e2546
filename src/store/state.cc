#include "store/state.h"

#include <algorithm>

#include "base/fail.h"
#include "store/limits.h"

namespace tessera::store {
namespace {

size_t bytes_of(const KeyValue& kv) {
  return kv.key.size() + kv.value.size();
}

}  // namespace

Record State::find(std::string_view key) const {
  const auto found = keys_.find(key);
  return found == keys_.end() ? nullptr : found->second;
}

std::vector<Record> State::find_prefix(std::string_view prefix) const {
  std::vector<Record> found;
  for (auto it = keys_.lower_bound(prefix); it != keys_.end() && it->first.starts_with(prefix); ++it)
    found.push_back(it->second);
  return found;
}

State::Outcome State::transact(const StoreTransaction& transaction) {
  Outcome outcome{.succeeded = true};
  for (const StoreCompare& compare : transaction.compares) {
    const Record record = find(compare.key);
    if (record != nullptr) outcome.current.push_back(record);
    if ((record == nullptr ? 0 : record->mod_revision) != compare.mod_revision) outcome.succeeded = false;
  }
  if (!outcome.succeeded) return outcome;
  outcome.current.clear();
  check_room(transaction);

  const int64_t revision = revision_ + 1;
  std::vector<Event> events;
  for (const StoreOperation& operation : transaction.operations) {
    restored_.erase(operation.key);
    if (operation.type == StoreOperation::Type::kDelete) {
      remove(operation.key, revision, events);
      continue;
    }
    const Record before = find(operation.key);
    outcome.stored.push_back(store({.key = operation.key,
                                    .value = operation.value,
                                    .create_revision = before == nullptr ? revision : before->create_revision,
                                    .mod_revision = revision,
                                    .version = before == nullptr ? 1 : before->version + 1,
                                    .lease = operation.options.lease,
                                    .decision = operation.options.decision}));
    events.push_back({.type = StoreEvent::Type::kPut, .kv = outcome.stored.back()});
  }
  commit(std::move(events));
  return outcome;
}

void State::check_room(const StoreTransaction& transaction) const {
  size_t bytes = stored_bytes_;
  size_t keys = keys_.size();
  for (const StoreOperation& operation : transaction.operations) {
    if (operation.type != StoreOperation::Type::kPut) continue;
    if (operation.options.lease != kNoLease && !leases_.contains(operation.options.lease))
      fail(ErrorCode::kNotFound, "put '{}': no lease {:#x} (expired or revoked)", operation.key,
           operation.options.lease);
    bytes += operation.key.size() + operation.value.size();
    keys += 1;
  }
  if (bytes > kMaxStoredBytes || keys > kMaxKeys)
    fail(ErrorCode::kResourceExhausted, "the store is full: {} keys and {} bytes, at most {} and {}", keys_.size(),
         stored_bytes_, kMaxKeys, kMaxStoredBytes);
}

size_t State::erase(std::string_view key) {
  std::vector<Event> events;
  const bool erased = remove(key, revision_ + 1, events);
  commit(std::move(events));
  return erased ? 1 : 0;
}

size_t State::erase_prefix(std::string_view prefix) {
  std::vector<Event> events;
  for (const Record& record : find_prefix(prefix)) remove(record->key, revision_ + 1, events);
  const size_t erased = events.size();
  commit(std::move(events));
  return erased;
}

void State::grant(LeaseId lease, Duration ttl, TimePoint now) {
  if (!leases_.contains(lease) && leases_.size() >= kMaxLeases)
    fail(ErrorCode::kResourceExhausted, "the store has {} leases, it takes no more", leases_.size());
  Lease& granted = leases_[lease];
  expiries_.erase({granted.expiry, lease});
  granted.ttl = ttl;
  granted.expiry = now + ttl;
  expiries_.emplace(granted.expiry, lease);
}

bool State::keep_alive(LeaseId lease, TimePoint now) {
  const auto found = leases_.find(lease);
  if (found == leases_.end()) return false;
  grant(lease, found->second.ttl, now);
  return true;
}

void State::revoke(LeaseId lease) {
  const auto found = leases_.find(lease);
  if (found == leases_.end()) return;
  const auto keys = found->second.keys;  // remove() takes them off the lease
  std::vector<Event> events;
  for (const std::string& key : keys) remove(key, revision_ + 1, events);
  expiries_.erase({found->second.expiry, lease});
  leases_.erase(found);
  commit(std::move(events));
}

void State::expire(TimePoint now) {
  while (!expiries_.empty() && expiries_.begin()->first <= now) revoke(expiries_.begin()->second);
}

std::optional<TimePoint> State::next_expiry() const {
  return expiries_.empty() ? std::nullopt : std::optional(expiries_.begin()->first);
}

void State::restore(const KeyValue& kv, bool silent) {
  const Record standing = find(kv.key);
  const auto restored = restored_.find(kv.key);
  if (standing != nullptr && (restored == restored_.end() || restored->second >= kv.mod_revision)) return;
  const StoreOperation put{.type = StoreOperation::Type::kPut,
                           .key = kv.key,
                           .value = kv.value,
                           .options = {.lease = kv.lease, .decision = kv.decision}};
  // Every put is a revision: a key that claims more than this store has reached is a new change.
  const bool credible =
      kv.mod_revision <= revision_ && kv.create_revision <= kv.mod_revision && kv.version <= kv.mod_revision;
  if (silent && credible) {
    check_room({.compares = {}, .operations = {put}});
    store(kv);
  } else {
    transact({.compares = {}, .operations = {put}});
  }
  restored_[kv.key] = kv.mod_revision;
}

void State::raise_revision(int64_t revision) {
  revision_ = (std::max(revision, revision_) / kRevisionsPerStore + 1) * kRevisionsPerStore;
  compacted_ = revision_;
  history_.clear();
  history_bytes_ = 0;
}

std::vector<Event> State::events_from(int64_t from, std::string_view prefix) const {
  std::vector<Event> events;
  auto it = std::ranges::lower_bound(history_, from, {}, &Event::revision);
  for (; it != history_.end(); ++it)
    if (it->kv->key.starts_with(prefix)) events.push_back(*it);
  return events;
}

Record State::store(KeyValue kv) {
  Record& record = keys_[kv.key];
  if (record != nullptr) {
    stored_bytes_ -= bytes_of(*record);
    detach(*record);
  }
  if (kv.lease != kNoLease) leases_.at(kv.lease).keys.insert(kv.key);
  stored_bytes_ += bytes_of(kv);
  record = std::make_shared<const KeyValue>(std::move(kv));
  return record;
}

bool State::remove(std::string_view key, int64_t revision, std::vector<Event>& events) {
  const auto found = keys_.find(key);
  if (found == keys_.end()) return false;
  const Record record = found->second;
  stored_bytes_ -= bytes_of(*record);
  detach(*record);
  keys_.erase(found);
  restored_.erase(record->key);
  KeyValue deleted;
  deleted.key = record->key;
  deleted.mod_revision = revision;
  events.push_back({.type = StoreEvent::Type::kDelete, .kv = std::make_shared<const KeyValue>(std::move(deleted))});
  return true;
}

void State::detach(const KeyValue& kv) {
  const auto lease = leases_.find(kv.lease);
  if (lease != leases_.end()) lease->second.keys.erase(kv.key);
}

void State::commit(std::vector<Event> events) {
  if (events.empty()) return;
  revision_ += 1;
  for (const Event& event : events) history_bytes_ += bytes_of(*event.kv);
  history_.insert(history_.end(), events.begin(), events.end());
  if (sink_) sink_(events);
  while (history_.size() > limits_.history_events || history_bytes_ > limits_.history_bytes) {
    compacted_ = history_.front().revision();
    while (!history_.empty() && history_.front().revision() == compacted_) {  // a revision goes as a whole
      history_bytes_ -= bytes_of(*history_.front().kv);
      history_.pop_front();
    }
  }
}

}  // namespace tessera::store
