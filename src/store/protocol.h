// The messages between store client and server: docs/formats/store-protocol.md.
//
// message_bytes() writes them, and decode() reads a payload that another process wrote: it throws
// Error(kInvalidArgument) unless every length, code and key is valid.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/fields.h"
#include "base/framing.h"
#include "base/message.h"
#include "base/process.h"
#include "store/limits.h"
#include "store/token.h"
#include "tessera/store.h"

namespace tessera::store {

inline constexpr uint32_t kMagic = 0x31534b54;  // "TKS1"
// For writers whose queue is limited elsewhere.
inline constexpr size_t kNoQueueLimit = std::numeric_limits<size_t>::max() / 2;
inline constexpr uint16_t kHelloVersion =
    0;  // of StoreHello, Challenge, Proof, StoreWelcome and Refused; the same in every release
inline constexpr uint16_t kMinVersion = 2;
inline constexpr uint16_t kMaxVersion = 2;

inline constexpr uint32_t kMaxHelloBytes = 4096;
inline constexpr uint32_t kMaxRequestBytes = uint32_t{20} << 20;  // the values and keys of a transaction, and some room
inline constexpr uint32_t kMaxReplyBytes = uint32_t{256} << 20;
inline constexpr uint32_t kMaxListedLeases = 4096;  // in one message
inline constexpr uint32_t kMaxReleaseBytes = 64;
// Revisions beyond it are refused.
inline constexpr int64_t kMaxRevision = int64_t{1} << 61;
// The highest revision from which a store may be asked to continue: the other half is room for its own.
inline constexpr int64_t kMaxContinued = kMaxRevision / 2;

enum class StoreMessage : uint16_t {
  // client to server
  kHello = 1,
  kRepublishLeases = 2,
  kRepublishKeys = 3,
  kRepublishDone = 4,
  kRequest = 5,
  kWatch = 6,
  kUnwatch = 7,
  kKeepAlive = 8,
  kProof = 9,
  // server to client
  kWelcome = 64,
  kRefused = 65,
  kReply = 66,
  kEvents = 67,
  kCompacted = 68,
  kLeasesLost = 69,
  kChallenge = 70,
};

// Fields that several messages share. Readers throw Error(kInvalidArgument) unless keys, revisions and leases are
// valid.
template <typename Fields, typename Text>
void key_field(Fields& f, Text& key) {
  f("key", key, kMaxStoreKeyBytes);
  if constexpr (kReads<Fields>) check_key(key);
}
template <typename Fields, typename Number>
void revision_field(Fields& f, std::string_view name, Number& revision, std::string_view of) {
  f(name, revision);
  f.require(revision >= 0 && revision <= kMaxRevision, "{}: revision {}"_message, of, revision);
}
// A nonce or a proof.
template <typename Fields, typename Digest>
void digest_field(Fields& f, std::string_view name, Digest& digest) {
  std::vector<std::byte> bytes(digest.begin(), digest.end());
  f.array(name, bytes, uint32_t{std::tuple_size_v<std::remove_const_t<Digest>>});
  f.require(bytes.size() == digest.size(), "a nonce or proof of {} bytes"_message, bytes.size());
  if constexpr (kFills<Fields>) std::copy_n(bytes.begin(), std::min(bytes.size(), digest.size()), digest.begin());
}
// For a KeyValue, or a view of one.
template <typename Fields, typename Key>
void key_value_fields(Fields& f, Key& kv) {
  if constexpr (requires { *kv; }) {
    key_value_fields(f, *kv);
  } else {
    key_field(f, kv.key);
    f("value", kv.value, kMaxStoreValueBytes);
    revision_field(f, "create_revision", kv.create_revision, kv.key);
    revision_field(f, "mod_revision", kv.mod_revision, kv.key);
    f("version", kv.version);
    f("lease", kv.lease);
    f("decision", kv.decision);
    f.require(kv.version >= 0 && kv.lease >= 0, "'{}' has version {} and lease {}"_message, kv.key, kv.version,
              kv.lease);
  }
}
inline constexpr size_t kLeastKeyValue = 4 + 4 + 4 * 8 + 1;  // bytes
template <typename Fields, typename Keys>
void key_values_field(Fields& f, Keys& keys) {
  f.each("keys", keys, kMaxKeys, kLeastKeyValue, [](auto& g, auto& kv) { key_value_fields(g, kv); });
}
template <typename Fields, typename Lease>
void lease_field(Fields& f, Lease& lease) {
  f("lease", lease);
  f.require(lease > 0, "a lease's id is {}"_message, lease);
}
template <typename Fields, typename Leases>
void leases_field(Fields& f, Leases& leases) {
  f.each("leases", leases, kMaxListedLeases, sizeof(LeaseId), [](auto& g, auto& lease) { lease_field(g, lease); });
}

struct StoreHello {
  static constexpr std::string_view kName = "hello";
  uint16_t min_version = kMinVersion;
  uint16_t max_version = kMaxVersion;
  std::string release;
  uint64_t client = 0;         // random, different for each client
  uint64_t last_instance = 0;  // of the last store that it was connected to; 0: none
  int64_t last_revision = 0;   // the highest that it has seen from any store
  Incarnation incarnation{};
  Nonce nonce{};
  bool speaks_ours() const { return min_version <= kMaxVersion && max_version >= kMinVersion; }
  static void fields(auto& f, auto& self) {
    f("min_version", self.min_version);
    f("max_version", self.max_version);
    f("release", self.release, kMaxReleaseBytes);
    if (self.speaks_ours()) {  // otherwise the rest may have another format
      f("client", self.client);
      f("last_instance", self.last_instance);
      revision_field(f, "last_revision", self.last_revision, "hello");
      f("incarnation", self.incarnation);
      digest_field(f, "nonce", self.nonce);
    }
    f.end_of_this_version();
  }
};

// A server with a token asks the client for its proof.
struct Challenge {
  static constexpr std::string_view kName = "challenge";
  uint16_t version = 0;
  std::string release;
  Nonce nonce{};
  static void fields(auto& f, auto& self) {
    f("version", self.version);
    f("release", self.release, kMaxReleaseBytes);
    digest_field(f, "nonce", self.nonce);
    f.end_of_this_version();
  }
};

struct ProofAnswer {
  static constexpr std::string_view kName = "proof";
  Proof proof{};
  static void fields(auto& f, auto& self) { digest_field(f, "proof", self.proof); }
};

struct StoreWelcome {
  static constexpr std::string_view kName = "welcome";
  uint16_t version = 0;
  std::string release;
  uint64_t instance = 0;         // random, different for each server
  std::optional<Proof> proof{};  // from a server with a token
  static void fields(auto& f, auto& self) {
    f("version", self.version);
    f("release", self.release, kMaxReleaseBytes);
    f("instance", self.instance);
    if (self.version >= kMinVersion) {
      bool proves = self.proof.has_value();
      f("proves", proves);
      if constexpr (kFills<decltype(f)>) self.proof = proves ? std::optional(Proof{}) : std::nullopt;
      if (self.proof) digest_field(f, "proof", *self.proof);
    }
    f.end_of_this_version();
  }
};

struct LeaseTerm {
  LeaseId lease = kNoLease;
  Duration ttl{};
  static void fields(auto& f, auto& self) {
    lease_field(f, self.lease);
    int64_t ttl = self.ttl.count();
    f("ttl", ttl);
    if constexpr (kFills<decltype(f)>) self.ttl = Duration(ttl);
    if constexpr (kReads<decltype(f)>) check_ttl(self.ttl);
  }
};

enum class Op : uint8_t { kRange, kErase, kTransact, kGrant, kRevoke };

struct Request {
  static constexpr std::string_view kName = "request";
  uint64_t id = 0;
  Op op = Op::kRange;
  std::string key{};    // kRange, kErase: a key, or
  bool prefix = false;  //   a prefix
  uint64_t token = 0;   // kTransact: random; the same if it is sent again
  StoreTransaction transaction{};
  LeaseTerm lease{};              // kGrant
  std::vector<LeaseId> leases{};  // kRevoke

  static void fields(auto& f, auto& self) {
    f("id", self.id);
    f("op", self.op, Op::kRevoke);
    switch (self.op) {
      case Op::kRange:
      case Op::kErase:
        f("key", self.key, kMaxStoreKeyBytes);
        f("prefix", self.prefix);
        if constexpr (kReads<decltype(f)>) self.prefix ? check_prefix(self.key) : check_key(self.key);
        break;
      case Op::kTransact:
        f("token", self.token);
        transaction_fields(f, self.transaction);
        break;
      case Op::kGrant:
        f("lease", self.lease);
        break;
      case Op::kRevoke: {
        const auto bytes_of = [&] {
          return static_cast<uint32_t>(sizeof(uint32_t) + self.leases.size() * sizeof(LeaseId));
        };
        uint32_t bytes = bytes_of();
        f("bytes", bytes);
        leases_field(f, self.leases);
        f.require(bytes == bytes_of(), "a list of leases: {} bytes for {}"_message, bytes, self.leases.size());
        break;
      }
    }
  }

 private:
  template <typename Fields, typename Transaction>
  static void transaction_fields(Fields& f, Transaction& transaction) {
    f.each("compares", transaction.compares, kMaxTransactionItems, 4 + 8, [](auto& g, auto& compare) {
      key_field(g, compare.key);
      revision_field(g, "mod_revision", compare.mod_revision, "a compare");
    });
    f.each("operations", transaction.operations, kMaxTransactionItems, 1 + 4 + 4 + 8 + 1, [](auto& g, auto& operation) {
      g("type", operation.type, StoreOperation::Type::kDelete);
      key_field(g, operation.key);
      g("value", operation.value, kMaxStoreValueBytes);
      g("lease", operation.options.lease);
      g("decision", operation.options.decision);
    });
    if constexpr (kReads<Fields>) check_transaction(transaction);
  }
};

// After its request's id, a Reply has an error code, with a text unless that is kOk; then the result: nothing for
// kGrant and kRevoke, otherwise a RangeReply, EraseReply or TransactReply.
template <typename Fields, typename State>
void reply_status_field(Fields& f, State& status) {
  ErrorCode code = status.code();
  error_code_field(f, code,
                   [&](uint8_t byte) { f.require(byte <= kLastErrorCode, "reply: error code {}"_message, byte); });
  if constexpr (kFills<Fields>) status = {};
  if (code != ErrorCode::kOk) status_text_field(f, code, status, 4096);
}
struct ReplyHead {
  uint64_t request = 0;  // 0: refuses a hello
  Status status{};
  static void fields(auto& f, auto& self) {
    f("request", self.request);
    reply_status_field(f, self.status);
  }
};

template <typename Key>
struct RangeReplyOf {
  int64_t revision = 0;
  std::vector<Key> keys;
  static void fields(auto& f, auto& self) {
    revision_field(f, "revision", self.revision, "a range's reply");
    key_values_field(f, self.keys);
  }
};
using RangeReply = RangeReplyOf<KeyValue>;

struct EraseReply {
  int64_t count = 0;
  static void fields(auto& f, auto& self) { f("count", self.count); }
};

struct PutMark {
  int64_t create_revision = 0;
  int64_t version = 0;
  static void fields(auto& f, auto& self) {
    f("create_revision", self.create_revision);
    f("version", self.version);
  }
};
struct TransactReply {
  bool succeeded = false;
  int64_t revision = 0;
  std::vector<PutMark> marks;  // one for each put, if it succeeded
  std::vector<KeyValue> current;
  static void fields(auto& f, auto& self) {
    f("succeeded", self.succeeded);
    revision_field(f, "revision", self.revision, "a transaction's reply");
    f("marks", self.marks, kMaxTransactionItems);
    key_values_field(f, self.current);
  }
};

// KeepAlive, LeasesLost.
struct LeaseList {
  static constexpr std::string_view kName = "a list of leases";
  std::vector<LeaseId> leases;
  static void fields(auto& f, auto& self) { leases_field(f, self.leases); }
};

// RepublishLeases, RepublishKeys.
struct LeaseTermList {
  static constexpr std::string_view kName = "a list of leases and their terms";
  std::vector<LeaseTerm> terms;
  static void fields(auto& f, auto& self) { f("terms", self.terms, kMaxListedLeases); }
};
template <typename Key>
struct KeyListOf {
  static constexpr std::string_view kName = "republication";
  std::vector<Key> keys;
  static void fields(auto& f, auto& self) { key_values_field(f, self.keys); }
};
using KeyList = KeyListOf<KeyValue>;

struct WatchStart {
  static constexpr std::string_view kName = "watch";
  uint64_t watch = 0;
  std::string prefix;
  int64_t from = 0;  // the revision to begin with
  static void fields(auto& f, auto& self) {
    f("watch", self.watch);
    f("prefix", self.prefix, kMaxStoreKeyBytes);
    f("from", self.from);
  }
};

struct WatchEnd {
  static constexpr std::string_view kName = "unwatch";
  uint64_t watch = 0;
  static void fields(auto& f, auto& self) { f("watch", self.watch); }
};

template <typename Event>
struct WatchEventsOf {
  static constexpr std::string_view kName = "events";
  uint64_t watch = 0;
  std::vector<Event> events;
  static void fields(auto& f, auto& self) {
    f("watch", self.watch);
    f.each("events", self.events, kMaxKeys, 1 + kLeastKeyValue, [](auto& g, auto& event) {
      g("type", event.type, StoreEvent::Type::kDelete);
      key_value_fields(g, event.kv);
    });
  }
};
using WatchEvents = WatchEventsOf<StoreEvent>;

struct Compacted {
  static constexpr std::string_view kName = "compacted";
  uint64_t watch = 0;
  int64_t revision = 0;
  static void fields(auto& f, auto& self) {
    f("watch", self.watch);
    revision_field(f, "revision", self.revision, "compacted");
  }
};

template <typename Message>
Message decode(std::span<const std::byte> payload) {
  return read_message<Message>(payload, Message::kName);
}

std::string_view release();  // this build's, "0.1.0"

inline uint16_t raw(StoreMessage type) {
  return static_cast<uint16_t>(type);
}

uint64_t random_id();  // never 0

}  // namespace tessera::store
