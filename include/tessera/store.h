// The rendezvous store: a small key-value service in which jobs find each other. The model is etcd v3's.
//
// Every change gets the next revision of the whole store, an integer that only grows. A key remembers the revisions
// that created and last modified it and may hang on a lease: when the lease ends, its keys are deleted as one change.
// A range names the revision it is true at; a watch from the next revision then misses nothing.
//
// State is soft, unless the store keeps it on disk (ServeOptions::data_dir). A client remembers the keys it put under
// its leases and the decisions it saw (PutOptions::decision); when it meets a store that has forgotten them (a
// restarted server, another host of "auto") it publishes them again, with their revisions. Revisions keep growing
// across such a change; watches get kCompacted and list again.
//
// Protocol: docs/formats/store-protocol.md.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/error.h"

namespace tessera {

inline constexpr size_t kMaxStoreKeyBytes = 512;
inline constexpr size_t kMaxStoreValueBytes = size_t{16} << 20;
inline constexpr size_t kMaxTransactionItems = 128;  // compares and operations together

using LeaseId = int64_t;
inline constexpr LeaseId kNoLease = 0;

struct KeyValue {
  std::string key{};
  std::string value{};          // bytes
  int64_t create_revision = 0;  // of the put that made the key
  int64_t mod_revision = 0;     // of its last put; of the deletion in a kDelete event
  int64_t version = 0;          // puts since it was made, from 1
  LeaseId lease = kNoLease;
  bool decision = false;
  bool operator==(const KeyValue&) const = default;
};

// What a prefix holds, by key.
using StoreView = std::map<std::string, KeyValue, std::less<>>;

struct StoreRange {
  StoreView items{};
  int64_t revision = 0;  // the store's, at which `items` is true
};

struct PutOptions {
  LeaseId lease = kNoLease;  // one this client was granted
  bool decision = false;     // must survive the store's host: every client that sees the key keeps it
};

struct StoreCompare {
  std::string key{};
  int64_t mod_revision = 0;  // what it must be; 0: the key must be absent
};

struct StoreOperation {
  enum class Type : uint8_t { kPut, kDelete };
  Type type = Type::kPut;
  std::string key{};
  std::string value{};
  PutOptions options{};
};

// If every compare holds, all operations happen as one change; otherwise none.
struct StoreTransaction {
  std::vector<StoreCompare> compares{};
  std::vector<StoreOperation> operations{};
};

struct TransactionResult {
  bool succeeded = false;
  int64_t revision = 0;  // the store's, after the transaction
  StoreView current{};   // the keys it put, as they now stand; if it failed: the compared keys that exist
};

struct SwapResult {
  bool stored = false;
  KeyValue current{};  // what the key holds now; key and revisions empty if it is absent
};

struct StoreEvent {
  enum class Type : uint8_t { kPut, kDelete };
  Type type = Type::kPut;
  KeyValue kv{};  // of a deletion: key and mod_revision
};

// All events of one or more whole revisions, in order; or the end of the watch.
struct WatchUpdate {
  enum class Type : uint8_t { kEvents, kCompacted, kClosed };
  Type type = Type::kEvents;
  std::vector<StoreEvent> events{};
  int64_t revision = 0;  // kEvents: the last event's. kCompacted: list again, the wanted events are forgotten.
};

// Ends its watch when destroyed: afterwards the callback does not run any more. Unless destroyed inside the callback
// that waits for a callback in progress, so hold no lock that the callback takes. Destroy it before its store.
class Watch {
 public:
  virtual ~Watch() = default;
};

// A client. Thread-safe. It has one thread of its own for the socket, lease renewals and watches. Every call blocks for
// `timeout` at most and throws Error: kDeadlineExceeded, or kUnavailable when no store could be reached in that time,
// both naming the URL and the request; kInvalidArgument for keys and values beyond the limits; kCancelled after
// close(). A lost connection is restored in the background and requests under way are sent again.
//
// A forked child must not use its parent's client.
class Store {
 public:
  using Timeout = std::chrono::nanoseconds;
  static constexpr Timeout kDefaultTimeout = std::chrono::seconds(10);
  using WatchCallback = std::function<void(const WatchUpdate&)>;
  using Predicate = std::function<bool(const StoreView&)>;

  virtual ~Store() = default;
  virtual const std::string& url() const = 0;

  // Returns the key's mod_revision. kNotFound if the lease is unknown.
  virtual int64_t put(std::string_view key, std::string_view value, PutOptions options = {},
                      Timeout timeout = kDefaultTimeout) = 0;
  virtual std::optional<KeyValue> get(std::string_view key, Timeout timeout = kDefaultTimeout) = 0;
  // All keys that begin with `prefix`; all keys there are if it is empty.
  virtual StoreRange range(std::string_view prefix, Timeout timeout = kDefaultTimeout) = 0;
  // The number of keys deleted.
  virtual int64_t erase(std::string_view key, Timeout timeout = kDefaultTimeout) = 0;
  virtual int64_t erase_prefix(std::string_view prefix, Timeout timeout = kDefaultTimeout) = 0;
  // At most kMaxTransactionItems compares and operations, no key operated on twice. Carried out at most once by one
  // server, even when sent again; after a change of host it is decided again against what was published again, so that
  // `current` may then show the client's own first attempt.
  virtual TransactionResult transact(const StoreTransaction& transaction, Timeout timeout = kDefaultTimeout) = 0;

  // A lease of `ttl` (at least 1 ms), renewed every ttl/3 in the background until it is revoked or the client closes;
  // close() revokes it. If it expires all the same (the process was stopped), it is granted and its keys are published
  // again, with a warning in the log.
  virtual LeaseId grant_lease(Timeout ttl, Timeout timeout = kDefaultTimeout) = 0;
  // Deletes the lease's keys.
  virtual void revoke_lease(LeaseId lease, Timeout timeout = kDefaultTimeout) = 0;

  // Calls `callback` on the client's thread with every change under `prefix` from `from_revision` (> 0) on, until it
  // has been given kCompacted or kClosed. It must not block, and the calls above throw when made from it.
  virtual std::unique_ptr<Watch> watch(std::string_view prefix, int64_t from_revision, WatchCallback callback) = 0;

  // Requests that calls have made so far, each counted once; lease renewals and repetitions are not counted.
  virtual uint64_t requests() const = 0;

  // Fails all calls under way with kCancelled, revokes the client's leases as far as the store can be reached at once
  // and ends the thread. Idempotent; the destructor does it.
  virtual void close() = 0;

  // Puts `key` only if it is absent; `current` tells what stands.
  SwapResult put_if_absent(std::string_view key, std::string_view value, PutOptions options = {},
                           Timeout timeout = kDefaultTimeout);
  // Puts `key` only if its mod_revision is `expected` (0: absent).
  SwapResult compare_and_set(std::string_view key, int64_t expected, std::string_view value, PutOptions options = {},
                             Timeout timeout = kDefaultTimeout);

  // Waits until what `prefix` holds satisfies `predicate` and returns it: one range and one watch, no polling. The
  // predicate runs on the calling thread. Throws kDeadlineExceeded, and kCancelled once `stop` is requested.
  StoreView wait_for(std::string_view prefix, const Predicate& predicate, Timeout timeout,
                     const std::stop_token& stop = {});
};

struct StoreOptions {
  // For "auto", and where a "tcp://" store of this user leaves its token; empty: the default (see TESSERA_RUNTIME_DIR).
  std::string runtime_dir{};
  // How long open_store() waits for the first connection; a line in the log every 10 s says that it does.
  std::chrono::nanoseconds connect_timeout = std::chrono::seconds(10);
  // Once it is requested, nothing waits for a connection any more: open_store(), and calls of the client without one,
  // end with kCancelled. Calls of a connected client still work, so that it can take back what it has put.
  std::stop_token stop{};
};

// "auto", "tcp://HOST:PORT" or "unix:///PATH". ("etcd://HOST:PORT" is reserved, and kUnimplemented.)
// Throws kInvalidArgument for any other URL, kUnavailable if no store answers in time and kCancelled once stopped.
//
// A "tcp://" store and its client prove to each other that they know one token, which does not cross the wire; what
// follows is neither encrypted nor signed. The token is in TESSERA_TOKEN, or in the file that TESSERA_TOKEN_FILE names,
// or where a store of the same user and runtime folder has left it. kPermissionDenied if it is none or another.
std::unique_ptr<Store> open_store(std::string_view url, const StoreOptions& options = {});

// A server on a thread of its own, which ends with the object. Thread-safe.
class StoreServer {
 public:
  virtual ~StoreServer() = default;
  // The URL for clients, with the real port: "tcp://127.0.0.1:40001".
  virtual std::string address() const = 0;
};

struct ServeOptions {
  // Where a store that was given no token leaves the one that it makes up; empty: the default.
  std::string runtime_dir{};
  // Keeps the store's state in this folder, which is made if need be, so that keys, decisions and leases (with their
  // full ttl) outlive the store's process; one store a folder. Empty: nowhere. A change that the disk refuses is
  // refused. What is synced when: src/store/memory/state_file.h.
  std::string data_dir{};
};

// Listens at "tcp://HOST:PORT" (port 0: any free one; "HOST:PORT" will do) or "unix:///PATH". A TCP store's token is
// the environment's, as above; without one it makes one up if it listens on the loopback interface, else it throws
// kPermissionDenied. On a Unix socket the kernel tells that a client is the same user's.
std::unique_ptr<StoreServer> serve_store(std::string_view url, const ServeOptions& options = {});

// "namespace/component/key". Throws kInvalidArgument for an empty part, a '/' in the first two, or a key too long.
std::string store_key(std::string_view name_space, std::string_view component, std::string_view key);

// Bytes as a value, e.g. what a ByteWriter wrote.
inline std::string_view as_store_value(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace tessera
