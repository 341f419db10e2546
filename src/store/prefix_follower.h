// Follows the keys of a prefix by a watch instead of listing them again and again.
#pragma once

#include <memory>
#include <stop_token>
#include <string>

#include "tessera/store.h"

namespace tessera::store {

// Used by one thread. The store must outlive it.
class PrefixFollower {
 public:
  PrefixFollower(Store& store, std::string prefix);
  ~PrefixFollower();
  PrefixFollower(const PrefixFollower&) = delete;
  PrefixFollower& operator=(const PrefixFollower&) = delete;

  // Returns once the prefix satisfies `predicate`, which is called immediately and after each change. Lists the prefix
  // the first time, and whenever the watch has missed events. Throws like Store::wait_for(); the next call then
  // continues from there.
  void wait(const Store::Predicate& predicate, Store::Timeout timeout, const std::stop_token& stop = {});
  // Makes the next wait() list the prefix again, as if the watch had missed events.
  void list_again();
  // The state that was last seen.
  const StoreView& view() const { return range_.items; }
  StoreView take() { return std::move(range_.items); }  // makes this the last call

 private:
  struct Feed;
  void list(const std::stop_token& stop, Store::Timeout timeout);

  Store& store_;
  const std::string prefix_;
  StoreRange range_;
  std::shared_ptr<Feed> feed_;  // filled by the watch; null: list first
  std::unique_ptr<Watch> watch_;
};

}  // namespace tessera::store
