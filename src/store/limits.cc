#include "store/limits.h"

#include <set>

#include "base/fail.h"

namespace tessera::store {

void check_key(std::string_view key) {
  if (key.empty()) fail(ErrorCode::kInvalidArgument, "a store key is empty"_message);
  if (key.size() > kMaxStoreKeyBytes)
    fail(ErrorCode::kInvalidArgument, "store key '{}...' has {} bytes, {} at most"_message, key.substr(0, 40),
         key.size(), kMaxStoreKeyBytes);
}

void check_prefix(std::string_view prefix) {
  if (!prefix.empty()) check_key(prefix);
}

void check_ttl(Duration ttl) {
  if (ttl < kMinTtl || ttl > kMaxTtl)
    fail(ErrorCode::kInvalidArgument, "a lease of {} s, it must be between {} s and {} s"_message, to_seconds(ttl),
         to_seconds(kMinTtl), to_seconds(kMaxTtl));
}

void check_transaction(const StoreTransaction& transaction) {
  const size_t items = transaction.compares.size() + transaction.operations.size();
  if (items > kMaxTransactionItems)
    fail(ErrorCode::kInvalidArgument, "a transaction of {} items, {} at most"_message, items, kMaxTransactionItems);
  for (const StoreCompare& compare : transaction.compares) {
    check_key(compare.key);
    if (compare.mod_revision < 0)
      fail(ErrorCode::kInvalidArgument, "revision {} to compare '{}' with"_message, compare.mod_revision, compare.key);
  }
  std::set<std::string_view> keys;
  size_t value_bytes = 0;
  for (const StoreOperation& operation : transaction.operations) {
    check_key(operation.key);
    if (!keys.insert(operation.key).second)
      fail(ErrorCode::kInvalidArgument, "a transaction changes '{}' twice"_message, operation.key);
    value_bytes += operation.value.size();
    if (value_bytes > kMaxStoreValueBytes)
      fail(ErrorCode::kInvalidArgument, "the value of '{}' brings the request to {} bytes, {} at most"_message,
           operation.key, value_bytes, kMaxStoreValueBytes);
  }
}

}  // namespace tessera::store
