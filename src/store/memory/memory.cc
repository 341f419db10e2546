#include "store/memory/memory.h"

#include <algorithm>

namespace tessera::store {
namespace {

constexpr size_t kChunkBytes = size_t{2} << 20;

std::vector<std::vector<std::byte>> lease_messages(const std::vector<LeaseTerm>& terms) {
  std::vector<std::vector<std::byte>> messages;
  for (size_t begin = 0; begin < terms.size(); begin += kMaxListedLeases) {
    const auto some = std::span(terms).subspan(begin, std::min<size_t>(kMaxListedLeases, terms.size() - begin));
    messages.push_back(message_bytes(LeaseTermList{{some.begin(), some.end()}}));
  }
  return messages;
}

std::vector<std::vector<std::byte>> key_messages(const std::vector<const KeyValue*>& keys) {
  std::vector<std::vector<std::byte>> messages;
  for (size_t begin = 0; begin < keys.size();) {
    size_t bytes = 0;
    KeyListOf<const KeyValue*> some;
    while (begin < keys.size() && (some.keys.empty() || bytes + keys[begin]->value.size() <= kChunkBytes)) {
      bytes += keys[begin]->value.size() + kMaxStoreKeyBytes;
      some.keys.push_back(keys[begin++]);
    }
    messages.push_back(message_bytes(some));
  }
  return messages;
}

}  // namespace

void Memory::revoked(LeaseId lease) {
  leases_.erase(lease);
  std::erase_if(kept_, [lease](const auto& entry) { return entry.second.lease == lease; });
}

void Memory::done(const StoreTransaction& transaction, const StoreView& stored) {
  for (const StoreOperation& operation : transaction.operations) kept_.erase(operation.key);
  for (const auto& [key, kv] : stored)
    if (kv.decision || own(kv)) kept_[key] = kv;
}

void Memory::erased(std::string_view key, bool prefix) {
  auto it = kept_.lower_bound(key);
  while (it != kept_.end() && (prefix ? it->first.starts_with(key) : it->first == key)) it = kept_.erase(it);
}

void Memory::seen(const KeyValue& kv) {
  const auto kept = kept_.find(kv.key);
  if (kept != kept_.end() && kept->second.mod_revision > kv.mod_revision) return;
  if (kv.decision || own(kv)) {
    kept_[kv.key] = kv;
  } else if (kept != kept_.end()) {
    kept_.erase(kept);  // another client has written it since
  }
}

void Memory::deleted(std::string_view key) {
  const auto kept = kept_.find(key);
  if (kept != kept_.end() && !own(kept->second)) kept_.erase(kept);
}

std::vector<LeaseId> Memory::leases() const {
  std::vector<LeaseId> leases;
  for (const auto& [lease, ttl] : leases_) leases.push_back(lease);
  return leases;
}

Memory::Republication Memory::republication() const {
  std::vector<LeaseTerm> terms;
  for (const auto& [lease, ttl] : leases_) terms.push_back({.lease = lease, .ttl = ttl});
  std::vector<const KeyValue*> keys;
  for (const auto& [key, kv] : kept_) keys.push_back(&kv);
  return {.leases = lease_messages(terms), .keys = key_messages(keys)};
}

Memory::Republication Memory::republication(const std::vector<LeaseId>& lost) const {
  std::vector<LeaseTerm> terms;
  for (const LeaseId lease : lost)
    if (has(lease)) terms.push_back({.lease = lease, .ttl = ttl(lease)});
  std::vector<const KeyValue*> keys;
  for (const auto& [key, kv] : kept_)
    if (own(kv) && std::ranges::count(lost, kv.lease) > 0) keys.push_back(&kv);
  return {.leases = lease_messages(terms), .keys = key_messages(keys)};
}

}  // namespace tessera::store
