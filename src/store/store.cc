// The parts that all Stores share, built on their own calls.
#include "tessera/store.h"

#include "base/fail.h"
#include "store/limits.h"
#include "store/prefix_follower.h"

namespace tessera {
SwapResult Store::put_if_absent(std::string_view key, std::string_view value, PutOptions options, Timeout timeout) {
  return compare_and_set(key, 0, value, options, timeout);
}

SwapResult Store::compare_and_set(std::string_view key, int64_t expected, std::string_view value, PutOptions options,
                                  Timeout timeout) {
  StoreTransaction transaction;
  transaction.compares.push_back({.key = std::string(key), .mod_revision = expected});
  transaction.operations.push_back(
      {.type = StoreOperation::Type::kPut, .key = std::string(key), .value = std::string(value), .options = options});
  TransactionResult result = transact(transaction, timeout);
  SwapResult swap{.stored = result.succeeded, .current = {}};
  if (!result.current.empty()) swap.current = std::move(result.current.begin()->second);
  return swap;
}

StoreView Store::wait_for(std::string_view prefix, const Predicate& predicate, Timeout timeout,
                          const std::stop_token& stop) {
  store::PrefixFollower follower(*this, std::string(prefix));
  follower.wait(predicate, timeout, stop);
  return follower.take();
}

std::string store_key(std::string_view name_space, std::string_view component, std::string_view key) {
  for (const std::string_view part : {name_space, component}) {
    if (part.empty() || part.find('/') != std::string_view::npos)
      fail(ErrorCode::kInvalidArgument, "'{}' cannot be part of a store key: it is empty or has a '/'"_message, part);
  }
  if (key.empty()) fail(ErrorCode::kInvalidArgument, "the key in '{}/{}' is empty"_message, name_space, component);
  std::string joined = fmt::format("{}/{}/{}", name_space, component, key);
  store::check_key(joined);
  return joined;
}

}  // namespace tessera
