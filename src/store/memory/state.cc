#include "store/memory/state.h"

#include <algorithm>

#include "base/fail.h"
#include "base/log.h"
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
    const Record before = find(operation.key);
    if (operation.type == StoreOperation::Type::kDelete) {
      if (before != nullptr) events.push_back(deletion_of(*before));
      continue;
    }
    outcome.stored.push_back(std::make_shared<const KeyValue>(
        KeyValue{.key = operation.key,
                 .value = operation.value,
                 .create_revision = before == nullptr ? revision : before->create_revision,
                 .mod_revision = revision,
                 .version = before == nullptr ? 1 : before->version + 1,
                 .lease = operation.options.lease,
                 .decision = operation.options.decision}));
    events.push_back({.type = StoreEvent::Type::kPut, .kv = outcome.stored.back()});
  }
  if (!events.empty()) keep({.revision = revision, .events = events});
  commit(events);
  return outcome;
}

void State::check_room(const StoreTransaction& transaction) const {
  size_t bytes = stored_bytes_;
  size_t keys = keys_.size();
  for (const StoreOperation& operation : transaction.operations) {
    if (operation.type != StoreOperation::Type::kPut) continue;
    if (operation.options.lease != kNoLease && !leases_.contains(operation.options.lease))
      fail(ErrorCode::kNotFound, "put '{}': no lease {:#x} (expired or revoked)"_message, operation.key,
           operation.options.lease);
    bytes += operation.key.size() + operation.value.size();
    keys += 1;
  }
  if (bytes > kMaxStoredBytes || keys > kMaxKeys)
    fail(ErrorCode::kResourceExhausted, "the store is full: {} keys and {} bytes, at most {} and {}"_message,
         keys_.size(), stored_bytes_, kMaxKeys, kMaxStoredBytes);
}

size_t State::erase(std::string_view key) {
  const Record record = find(key);
  if (record == nullptr) return 0;
  const Event event = deletion_of(*record);
  keep({.revision = revision_ + 1, .events = std::span(&event, 1)});
  commit({event});
  return 1;
}

size_t State::erase_prefix(std::string_view prefix) {
  std::vector<Event> events;
  for (const Record& record : find_prefix(prefix)) events.push_back(deletion_of(*record));
  if (!events.empty()) keep({.revision = revision_ + 1, .events = events});
  commit(events);
  return events.size();
}

void State::grant(LeaseId lease, Duration ttl, TimePoint now) {
  const auto known = leases_.find(lease);
  if (known == leases_.end() && leases_.size() >= kMaxLeases)
    fail(ErrorCode::kResourceExhausted, "the store has {} leases, it takes no more"_message, leases_.size());
  if (known == leases_.end() || known->second.ttl != ttl) keep({.revision = revision_, .lease = lease, .ttl = ttl});
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
  std::vector<Event> events;
  for (const std::string& key : found->second.keys) events.push_back(deletion_of(*find(key)));
  keep_if_possible({.revision = revision_ + (events.empty() ? 0 : 1), .events = events, .lease = lease});
  expiries_.erase({found->second.expiry, lease});
  leases_.erase(found);
  commit(events);
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
  // Every put is a revision: a key with a revision beyond the store's own is a new change.
  const bool credible =
      kv.mod_revision <= revision_ && kv.create_revision <= kv.mod_revision && kv.version <= kv.mod_revision;
  if (silent && credible) {
    check_room({.compares = {}, .operations = {put}});
    const Event event{.type = StoreEvent::Type::kPut, .kv = std::make_shared<const KeyValue>(kv)};
    keep({.revision = revision_, .events = std::span(&event, 1)});
    apply(event);
  } else {
    transact({.compares = {}, .operations = {put}});
  }
  restored_[kv.key] = kv.mod_revision;
}

void State::raise_revision(int64_t revision) {
  revision_ = (std::max(revision, revision_) / kRevisionsPerStore + 1) * kRevisionsPerStore;
  keep_if_possible({.revision = revision_});
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

Event State::deletion_of(const KeyValue& kv) const {
  return {.type = StoreEvent::Type::kDelete,
          .kv = std::make_shared<const KeyValue>(KeyValue{.key = kv.key, .mod_revision = revision_ + 1})};
}

void State::keep(const Change& change) const {
  if (keeper_) keeper_(change);
}

void State::keep_if_possible(const Change& change) const {
  try {
    keep(change);
  } catch (const Error& error) {
    log_event(LogLevel::err, "store.unsaved", {}, "a change is made without being saved: {}"_message, error.what());
  }
}

// Carries out what was planned and kept; it cannot fail any more.
void State::commit(const std::vector<Event>& events) {
  if (events.empty()) return;
  revision_ += 1;
  for (const Event& event : events) {
    apply(event);
    history_bytes_ += bytes_of(*event.kv);
  }
  history_.insert(history_.end(), events.begin(), events.end());
  if (sink_) sink_(events);
  while (history_.size() > limits_.history_events || history_bytes_ > limits_.history_bytes) {
    compacted_ = history_.front().revision();
    while (!history_.empty() && history_.front().revision() == compacted_) {  // a revision is dropped as a whole
      history_bytes_ -= bytes_of(*history_.front().kv);
      history_.pop_front();
    }
  }
}

void State::apply(const Event& event) {
  const KeyValue& kv = *event.kv;
  take_out(kv.key);
  if (event.type == StoreEvent::Type::kDelete) return;
  if (kv.lease != kNoLease) leases_.at(kv.lease).keys.insert(kv.key);
  stored_bytes_ += bytes_of(kv);
  keys_[kv.key] = event.kv;
}

void State::take_out(std::string_view key) {
  const auto found = keys_.find(key);
  if (found == keys_.end()) return;
  const KeyValue& kv = *found->second;
  stored_bytes_ -= bytes_of(kv);
  const auto lease = leases_.find(kv.lease);
  if (lease != leases_.end()) lease->second.keys.erase(kv.key);
  restored_.erase(kv.key);
  keys_.erase(found);
}

}  // namespace tessera::store
