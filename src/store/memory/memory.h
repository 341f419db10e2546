// What a client remembers of the store, to publish it again if the store forgets it: its leases, the keys that it put
// under them and the decisions that it saw. Thread-compatible; used only by the client's thread.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "store/protocol.h"

namespace tessera::store {

class Memory {
 public:
  void granted(LeaseTerm term) { leases_[term.lease] = term.ttl; }
  void revoked(LeaseId lease);
  // The client's own transaction succeeded and put the keys in `stored`.
  void done(const StoreTransaction& transaction, const StoreView& stored);
  // The client itself deleted a key, or all keys under a prefix.
  void erased(std::string_view key, bool prefix);
  // The store reported a key or its deletion. An own key may have been deleted because its lease was lost, so it is
  // kept.
  void seen(const KeyValue& kv);
  void deleted(std::string_view key);

  std::vector<LeaseId> leases() const;
  Duration ttl(LeaseId lease) const { return leases_.at(lease); }
  bool has(LeaseId lease) const { return leases_.contains(lease); }

  // Payloads of kRepublishLeases and kRepublishKeys: everything, or some leases and their keys.
  struct Republication {
    std::vector<std::vector<std::byte>> leases, keys;
  };
  Republication republication() const;
  Republication republication(const std::vector<LeaseId>& lost) const;

 private:
  bool own(const KeyValue& kv) const { return kv.lease != kNoLease && has(kv.lease); }

  std::map<LeaseId, Duration> leases_;
  StoreView kept_;
};

}  // namespace tessera::store
