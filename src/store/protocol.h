// The messages between store client and server: docs/formats/store-protocol.md.
//
// Readers take a payload that another process wrote and throw Error(kInvalidArgument) unless every length, code and key
// in it is sound.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/framing.h"
#include "base/process.h"
#include "store/token.h"
#include "tessera/store.h"

namespace tessera::store {

inline constexpr uint32_t kMagic = 0x31534b54;  // "TKS1"
// For writers whose queue is bounded elsewhere.
inline constexpr size_t kNoQueueLimit = std::numeric_limits<size_t>::max() / 2;
inline constexpr uint16_t kHelloVersion =
    0;  // of StoreHello, Challenge, Proof, StoreWelcome and Refused, in every release
inline constexpr uint16_t kMinVersion = 2;
inline constexpr uint16_t kMaxVersion = 2;

inline constexpr uint32_t kMaxHelloBytes = 4096;
inline constexpr uint32_t kMaxRequestBytes = uint32_t{20} << 20;  // a transaction's values, its keys and some room
inline constexpr uint32_t kMaxReplyBytes = uint32_t{256} << 20;
inline constexpr uint32_t kMaxListedLeases = 4096;  // in one message
// Revisions beyond it are refused.
inline constexpr int64_t kMaxRevision = int64_t{1} << 61;
// The highest that a store lets others tell it to continue from: the other half is room for its own.
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

struct StoreHello {
  uint16_t min_version = kMinVersion;
  uint16_t max_version = kMaxVersion;
  std::string release;
  uint64_t client = 0;         // random, one a client
  uint64_t last_instance = 0;  // the store it last spoke to; 0: none
  int64_t last_revision = 0;   // the highest it has seen of any
  Incarnation incarnation{};
  Nonce nonce{};

  std::vector<std::byte> encode() const;
  static StoreHello decode(std::span<const std::byte> payload);
};

// A server with a token asks the client for its proof.
struct Challenge {
  uint16_t version = 0;
  std::string release;
  Nonce nonce{};

  std::vector<std::byte> encode() const;
  static Challenge decode(std::span<const std::byte> payload);
};

struct StoreWelcome {
  uint16_t version = 0;
  std::string release;
  uint64_t instance = 0;         // random, one a server
  std::optional<Proof> proof{};  // of a server with a token

  std::vector<std::byte> encode() const;
  static StoreWelcome decode(std::span<const std::byte> payload);
};

struct LeaseTerm {
  LeaseId lease = kNoLease;
  Duration ttl{};
};

enum class Op : uint8_t { kRange, kErase, kTransact, kGrant, kRevoke };

struct Request {
  uint64_t id = 0;
  Op op = Op::kRange;
  std::string key{};    // kRange, kErase: a key, or
  bool prefix = false;  //   a prefix
  uint64_t token = 0;   // kTransact: random, the same when sent again
  StoreTransaction transaction{};
  LeaseTerm lease{};              // kGrant
  std::vector<LeaseId> leases{};  // kRevoke

  std::vector<std::byte> encode() const;
  static Request decode(std::span<const std::byte> payload);
};

// A Reply is the request's id and an ErrorCode, then a message unless that is kOk, else what the operation yields:
// kRange: revision, keys; kErase: count; kTransact: see below; kGrant, kRevoke: nothing.
struct PutMark {
  int64_t create_revision = 0;
  int64_t version = 0;
};
struct TransactReply {
  bool succeeded = false;
  int64_t revision = 0;
  std::vector<PutMark> marks;  // one a put, if it succeeded
  std::vector<KeyValue> current;

  void write(ByteWriter& out) const;
  static TransactReply read(ByteReader& in);
};

std::vector<std::byte> encode_proof(const Proof& proof);
Proof decode_proof(std::span<const std::byte> payload);

std::vector<std::byte> encode_error(uint64_t request, const Status& status);
Status read_status(ByteReader& in);

int64_t read_revision(ByteReader& in, std::string_view what);
void write_key_value(ByteWriter& out, const KeyValue& kv);
KeyValue read_key_value(ByteReader& in);
std::vector<KeyValue> read_key_values(ByteReader& in);

std::vector<std::byte> encode_leases(std::span<const LeaseId> leases);
std::vector<LeaseId> decode_leases(std::span<const std::byte> payload);
std::vector<std::byte> encode_lease_terms(std::span<const LeaseTerm> terms);
std::vector<LeaseTerm> decode_lease_terms(std::span<const std::byte> payload);

struct WatchStart {
  uint64_t watch = 0;
  std::string prefix;
  int64_t from = 0;  // a revision

  std::vector<std::byte> encode() const;
  static WatchStart decode(std::span<const std::byte> payload);
};

struct WatchEvents {
  uint64_t watch = 0;
  std::vector<StoreEvent> events;

  static WatchEvents decode(std::span<const std::byte> payload);
};

struct Compacted {
  uint64_t watch = 0;
  int64_t revision = 0;

  std::vector<std::byte> encode() const;
  static Compacted decode(std::span<const std::byte> payload);
};

std::string_view release();  // this build's, "0.1.0"

inline uint16_t raw(StoreMessage type) {
  return static_cast<uint16_t>(type);
}

uint64_t random_id();  // never 0

}  // namespace tessera::store
