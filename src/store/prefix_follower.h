// What a prefix of a store holds, followed by a watch instead of being listed again and again.
#pragma once

#include <memory>
#include <stop_token>
#include <string>

#include "tessera/store.h"

namespace tessera::store {

// Of one thread. The store must outlive it.
class PrefixFollower {
 public:
  PrefixFollower(Store& store, std::string prefix);
  ~PrefixFollower();
  PrefixFollower(const PrefixFollower&) = delete;
  PrefixFollower& operator=(const PrefixFollower&) = delete;

  // Returns once what the prefix holds satisfies `predicate`, which is asked at once, and again after each change. It
  // lists the prefix the first time, and when the watch has missed something. Throws as Store::wait_for() does; the
  // next call then goes on from there.
  void wait(const Store::Predicate& predicate, Store::Timeout timeout, const std::stop_token& stop = {});
  // The next wait() lists the prefix again, as if the watch had missed something.
  void list_again();
  // As it was seen last.
  const StoreView& view() const { return range_.items; }
  StoreView take() { return std::move(range_.items); }  // the last call

 private:
  struct Feed;
  void list(const std::stop_token& stop, Store::Timeout timeout);

  Store& store_;
  const std::string prefix_;
  StoreRange range_;
  std::shared_ptr<Feed> feed_;  // of the watch; null: list first
  std::unique_ptr<Watch> watch_;
};

}  // namespace tessera::store
