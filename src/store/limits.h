// The store's limits. Client and server both check them: the client to fail early, the server because it trusts nobody.
#pragma once

#include <string_view>

#include "base/clock.h"
#include "tessera/store.h"

namespace tessera::store {

inline constexpr size_t kMaxKeys = size_t{1} << 18;
inline constexpr size_t kMaxStoredBytes = size_t{1} << 30;  // keys and values together
inline constexpr size_t kMaxLeases = size_t{1} << 16;
inline constexpr Duration kMinTtl = std::chrono::milliseconds(1);
inline constexpr Duration kMaxTtl = std::chrono::hours(24);

// All throw Error(kInvalidArgument), which names the value and the limit.
void check_key(std::string_view key);
void check_prefix(std::string_view prefix);
void check_ttl(Duration ttl);
void check_transaction(const StoreTransaction& transaction);

}  // namespace tessera::store
