#include "store/protocol.h"

#include <algorithm>
#include <array>
#include <random>

#include "base/fields.h"
#include "store/limits.h"
#include "tessera/version.h"

namespace tessera::store {
namespace {

constexpr uint32_t kMaxReleaseBytes = 64;
constexpr uint32_t kMaxMessageBytes = 4096;
constexpr size_t kMinKeyValueBytes = 4 + 4 + 4 * 8 + 1;

std::string read_key(ByteReader& in) {
  std::string key = in.get_string(kMaxStoreKeyBytes);
  check_key(key);
  return key;
}

// A nonce or a proof.
std::array<std::byte, 32> read_digest(ByteReader& in) {
  std::array<std::byte, 32> digest;
  const auto bytes = in.get_bytes(digest.size());
  if (bytes.size() != digest.size()) fail(ErrorCode::kInvalidArgument, "a nonce or proof of {} bytes", bytes.size());
  std::ranges::copy(bytes, digest.begin());
  return digest;
}

LeaseId read_lease(ByteReader& in) {
  const auto lease = in.get<LeaseId>();
  if (lease <= 0) fail(ErrorCode::kInvalidArgument, "a lease's id is {}", lease);
  return lease;
}

LeaseTerm read_lease_term(ByteReader& in) {
  LeaseTerm term;
  term.lease = read_lease(in);
  term.ttl = Duration(in.get<int64_t>());
  check_ttl(term.ttl);
  return term;
}

void write_transaction(ByteWriter& out, const StoreTransaction& transaction) {
  out.put(static_cast<uint32_t>(transaction.compares.size()));
  for (const StoreCompare& compare : transaction.compares) {
    out.put_string(compare.key);
    out.put(compare.mod_revision);
  }
  out.put(static_cast<uint32_t>(transaction.operations.size()));
  for (const StoreOperation& operation : transaction.operations) {
    out.put(operation.type);
    out.put_string(operation.key);
    out.put_string(operation.value);
    out.put(operation.options.lease);
    out.put<uint8_t>(operation.options.decision ? 1 : 0);
  }
}

StoreTransaction read_transaction(ByteReader& in) {
  StoreTransaction transaction;
  transaction.compares.resize(in.get_count(kMaxTransactionItems, 4 + 8));
  for (StoreCompare& compare : transaction.compares) {
    compare.key = read_key(in);
    compare.mod_revision = read_revision(in, "a compare");
  }
  transaction.operations.resize(in.get_count(kMaxTransactionItems, 1 + 4 + 4 + 8 + 1));
  for (StoreOperation& operation : transaction.operations) {
    operation.type = in.get_enum(StoreOperation::Type::kDelete);
    operation.key = read_key(in);
    operation.value = in.get_string(kMaxStoreValueBytes);
    operation.options.lease = in.get<LeaseId>();
    operation.options.decision = in.get_bool();
  }
  check_transaction(transaction);
  return transaction;
}

}  // namespace

std::vector<std::byte> StoreHello::encode() const {
  ByteWriter out;
  out.put(min_version);
  out.put(max_version);
  out.put_string(release);
  out.put(client);
  out.put(last_instance);
  out.put(last_revision);
  write_fields(incarnation, out);
  out.put_bytes(nonce);
  return out.take();
}

StoreHello StoreHello::decode(std::span<const std::byte> payload) {
  ByteReader in(payload, "hello");
  StoreHello hello;
  hello.min_version = in.get<uint16_t>();
  hello.max_version = in.get<uint16_t>();
  hello.release = in.get_string(kMaxReleaseBytes);
  if (hello.min_version > kMaxVersion || hello.max_version < kMinVersion) return hello;  // the rest may look otherwise
  hello.client = in.get<uint64_t>();
  hello.last_instance = in.get<uint64_t>();
  hello.last_revision = read_revision(in, "hello");
  hello.incarnation = read_fields<Incarnation>(in);
  hello.nonce = read_digest(in);
  return hello;  // a later version may have more to say
}

std::vector<std::byte> Challenge::encode() const {
  ByteWriter out;
  out.put(version);
  out.put_string(release);
  out.put_bytes(nonce);
  return out.take();
}

Challenge Challenge::decode(std::span<const std::byte> payload) {
  ByteReader in(payload, "challenge");
  Challenge challenge;
  challenge.version = in.get<uint16_t>();
  challenge.release = in.get_string(kMaxReleaseBytes);
  challenge.nonce = read_digest(in);
  return challenge;
}

std::vector<std::byte> StoreWelcome::encode() const {
  ByteWriter out;
  out.put(version);
  out.put_string(release);
  out.put(instance);
  out.put<uint8_t>(proof ? 1 : 0);
  if (proof) out.put_bytes(*proof);
  return out.take();
}

StoreWelcome StoreWelcome::decode(std::span<const std::byte> payload) {
  ByteReader in(payload, "welcome");
  StoreWelcome welcome;
  welcome.version = in.get<uint16_t>();
  welcome.release = in.get_string(kMaxReleaseBytes);
  welcome.instance = in.get<uint64_t>();
  if (welcome.version >= kMinVersion && in.get_bool()) welcome.proof = read_digest(in);
  return welcome;
}

std::vector<std::byte> Request::encode() const {
  ByteWriter out;
  out.put(id);
  out.put(op);
  switch (op) {
    case Op::kRange:
    case Op::kErase:
      out.put_string(key);
      out.put<uint8_t>(prefix ? 1 : 0);
      break;
    case Op::kTransact:
      out.put(token);
      write_transaction(out, transaction);
      break;
    case Op::kGrant:
      out.put(lease.lease);
      out.put<int64_t>(lease.ttl.count());
      break;
    case Op::kRevoke:
      out.put_bytes(encode_leases(leases));
      break;
  }
  return out.take();
}

Request Request::decode(std::span<const std::byte> payload) {
  ByteReader in(payload, "request");
  Request request;
  request.id = in.get<uint64_t>();
  request.op = in.get_enum(Op::kRevoke);
  switch (request.op) {
    case Op::kRange:
    case Op::kErase:
      request.key = in.get_string(kMaxStoreKeyBytes);
      request.prefix = in.get_bool();
      if (request.prefix) check_prefix(request.key);
      if (!request.prefix) check_key(request.key);
      break;
    case Op::kTransact:
      request.token = in.get<uint64_t>();
      request.transaction = read_transaction(in);
      break;
    case Op::kGrant:
      request.lease = read_lease_term(in);
      break;
    case Op::kRevoke:
      request.leases = decode_leases(in.get_bytes(4 + kMaxListedLeases * sizeof(LeaseId)));
      break;
  }
  in.finish();
  return request;
}

void TransactReply::write(ByteWriter& out) const {
  out.put<uint8_t>(succeeded ? 1 : 0);
  out.put(revision);
  out.put(static_cast<uint32_t>(marks.size()));
  for (const PutMark& mark : marks) {
    out.put(mark.create_revision);
    out.put(mark.version);
  }
  out.put(static_cast<uint32_t>(current.size()));
  for (const KeyValue& kv : current) write_key_value(out, kv);
}

TransactReply TransactReply::read(ByteReader& in) {
  TransactReply reply;
  reply.succeeded = in.get_bool();
  reply.revision = read_revision(in, "a transaction's reply");
  reply.marks.resize(in.get_count(kMaxTransactionItems, 16));
  for (PutMark& mark : reply.marks) {
    mark.create_revision = in.get<int64_t>();
    mark.version = in.get<int64_t>();
  }
  reply.current = read_key_values(in);
  return reply;
}

std::vector<std::byte> encode_proof(const Proof& proof) {
  ByteWriter out;
  out.put_bytes(proof);
  return out.take();
}

Proof decode_proof(std::span<const std::byte> payload) {
  ByteReader in(payload, "proof");
  const Proof proof = read_digest(in);
  in.finish();
  return proof;
}

std::vector<std::byte> encode_error(uint64_t request, const Status& status) {
  ByteWriter out;
  out.put(request);
  out.put(static_cast<uint8_t>(status.code()));
  out.put_string(std::string_view(status.message()).substr(0, kMaxMessageBytes));
  return out.take();
}

Status read_status(ByteReader& in) {
  const auto code = in.get<uint8_t>();
  if (code == 0) return {};
  if (code > static_cast<uint8_t>(ErrorCode::kInternal))
    fail(ErrorCode::kInvalidArgument, "reply: error code {}", code);
  return Status(static_cast<ErrorCode>(code), in.get_string(kMaxMessageBytes));
}

int64_t read_revision(ByteReader& in, std::string_view what) {
  const auto revision = in.get<int64_t>();
  if (revision < 0 || revision > kMaxRevision) fail(ErrorCode::kInvalidArgument, "{}: revision {}", what, revision);
  return revision;
}

void write_key_value(ByteWriter& out, const KeyValue& kv) {
  out.put_string(kv.key);
  out.put_string(kv.value);
  out.put(kv.create_revision);
  out.put(kv.mod_revision);
  out.put(kv.version);
  out.put(kv.lease);
  out.put<uint8_t>(kv.decision ? 1 : 0);
}

KeyValue read_key_value(ByteReader& in) {
  KeyValue kv;
  kv.key = read_key(in);
  kv.value = in.get_string(kMaxStoreValueBytes);
  kv.create_revision = read_revision(in, kv.key);
  kv.mod_revision = read_revision(in, kv.key);
  kv.version = in.get<int64_t>();
  kv.lease = in.get<LeaseId>();
  kv.decision = in.get_bool();
  if (kv.version < 0 || kv.lease < 0)
    fail(ErrorCode::kInvalidArgument, "'{}' has version {} and lease {}", kv.key, kv.version, kv.lease);
  return kv;
}

std::vector<KeyValue> read_key_values(ByteReader& in) {
  std::vector<KeyValue> all(in.get_count(kMaxKeys, kMinKeyValueBytes));
  for (KeyValue& kv : all) kv = read_key_value(in);
  return all;
}

std::vector<std::byte> encode_leases(std::span<const LeaseId> leases) {
  ByteWriter out;
  out.put(static_cast<uint32_t>(leases.size()));
  for (const LeaseId lease : leases) out.put(lease);
  return out.take();
}

std::vector<LeaseId> decode_leases(std::span<const std::byte> payload) {
  ByteReader in(payload, "a list of leases");
  std::vector<LeaseId> leases(in.get_count(kMaxListedLeases, sizeof(LeaseId)));
  for (LeaseId& lease : leases) lease = read_lease(in);
  in.finish();
  return leases;
}

std::vector<std::byte> encode_lease_terms(std::span<const LeaseTerm> terms) {
  ByteWriter out;
  out.put(static_cast<uint32_t>(terms.size()));
  for (const LeaseTerm& term : terms) {
    out.put(term.lease);
    out.put<int64_t>(term.ttl.count());
  }
  return out.take();
}

std::vector<LeaseTerm> decode_lease_terms(std::span<const std::byte> payload) {
  ByteReader in(payload, "a list of leases and their terms");
  std::vector<LeaseTerm> terms(in.get_count(kMaxListedLeases, sizeof(LeaseId) + sizeof(int64_t)));
  for (LeaseTerm& term : terms) term = read_lease_term(in);
  in.finish();
  return terms;
}

std::vector<std::byte> WatchStart::encode() const {
  ByteWriter out;
  out.put(watch);
  out.put_string(prefix);
  out.put(from);
  return out.take();
}

WatchStart WatchStart::decode(std::span<const std::byte> payload) {
  ByteReader in(payload, "watch");
  WatchStart start;
  start.watch = in.get<uint64_t>();
  start.prefix = in.get_string(kMaxStoreKeyBytes);
  start.from = in.get<int64_t>();
  in.finish();
  return start;
}

WatchEvents WatchEvents::decode(std::span<const std::byte> payload) {
  ByteReader in(payload, "events");
  WatchEvents message;
  message.watch = in.get<uint64_t>();
  message.events.resize(in.get_count(kMaxKeys, 1 + kMinKeyValueBytes));
  for (StoreEvent& event : message.events) {
    event.type = in.get_enum(StoreEvent::Type::kDelete);
    event.kv = read_key_value(in);
  }
  in.finish();
  return message;
}

std::vector<std::byte> Compacted::encode() const {
  ByteWriter out;
  out.put(watch);
  out.put(revision);
  return out.take();
}

Compacted Compacted::decode(std::span<const std::byte> payload) {
  ByteReader in(payload, "compacted");
  Compacted message;
  message.watch = in.get<uint64_t>();
  message.revision = read_revision(in, "compacted");
  in.finish();
  return message;
}

std::string_view release() {
  return kVersion;
}

uint64_t random_id() {
  std::random_device random;
  return (uint64_t{random()} << 32) | random() | 1;
}

}  // namespace tessera::store
