#include "store/protocol.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "base/fields_testing.h"

namespace tessera::store {
namespace {

Request full_request() {
  Request request;
  request.id = 9;
  request.op = Op::kTransact;
  request.token = 77;
  request.transaction.compares.push_back({.key = "ns/bus/a", .mod_revision = 3});
  request.transaction.operations.push_back({.type = StoreOperation::Type::kPut,
                                            .key = "ns/bus/a",
                                            .value = std::string("\0bytes", 6),
                                            .options = {.lease = 5, .decision = true}});
  request.transaction.operations.push_back(
      {.type = StoreOperation::Type::kDelete, .key = "ns/bus/b", .value = {}, .options = {}});
  return request;
}

// Valid requests of each kind: random values would not satisfy their limits.
std::vector<Request> requests() {
  return {full_request(),
          {.id = 1, .op = Op::kRange, .key = "ns/", .prefix = true},
          {.id = 2, .op = Op::kErase, .key = "ns/bus/a"},
          {.id = 3, .op = Op::kGrant, .lease = {8, std::chrono::seconds(10)}},
          {.id = 4, .op = Op::kRevoke, .leases = {5, 6}}};
}

TEST(ProtocolTest, MessagesComeBackAsTheyAreDrawn) {
  expect_fields_hold<StoreHello>(true);  // a later version may have more
  expect_fields_hold<Challenge>(true);
  expect_fields_hold<StoreWelcome>(true);
  expect_fields_hold<ReplyHead>();
  expect_fields_hold<EraseReply>();
  expect_fields_hold<PutMark>();
  expect_fields_hold<LeaseList>();
  expect_fields_hold<WatchStart>();
  expect_fields_hold<WatchEnd>();
  expect_fields_hold<Compacted>();
}

TEST(ProtocolTest, MessagesComeBackAsTheyAreWritten) {
  for (const Request& request : requests()) expect_exact(request);
  const KeyValue kv{.key = "ns/bus/a", .value = std::string("\0bytes", 6), .mod_revision = 3, .version = 1, .lease = 5};
  expect_exact(RangeReply{.revision = 3, .keys = {kv, {.key = "b", .decision = true}}});
  expect_exact(TransactReply{.succeeded = true, .revision = 3, .marks = {{2, 1}}, .current = {kv}});
  expect_exact(LeaseTermList{{{8, std::chrono::seconds(10)}}});
  expect_exact(KeyList{{kv}});
  expect_exact(WatchEvents{.watch = 3, .events = {{.kv = kv}, {.type = StoreEvent::Type::kDelete, .kv = kv}}});
  expect_exact(ProofAnswer{random_nonce()});
}

TEST(ProtocolTest, ARequestHasItsFields) {
  const Request read = decode<Request>(message_bytes(full_request()));
  EXPECT_EQ(read.id, 9U);
  EXPECT_EQ(read.token, 77U);
  ASSERT_EQ(read.transaction.operations.size(), 2U);
  EXPECT_EQ(read.transaction.operations[0].value, std::string("\0bytes", 6));
  EXPECT_TRUE(read.transaction.operations[0].options.decision);
  EXPECT_EQ(read.transaction.operations[1].type, StoreOperation::Type::kDelete);
  EXPECT_EQ(read.transaction.compares[0].mod_revision, 3);
}

TEST(ProtocolTest, ADigestOfAnotherSizeIsRefused) {
  ByteWriter out;
  out.put_bytes(std::vector<std::byte>(31));
  EXPECT_THAT([&] { decode<ProofAnswer>(out.view()); },
              testing::ThrowsMessage<Error>(testing::HasSubstr("a nonce or proof of 31 bytes")));
}

TEST(ProtocolTest, OfAHelloWithoutACommonVersionOnlyTheBeginningIsRead) {
  const StoreHello hello{.min_version = kMaxVersion + 1, .max_version = kMaxVersion + 4, .release = "9.0"};
  const std::vector<std::byte> bytes = message_bytes(hello);
  EXPECT_EQ(bytes.size(), 2U + 2 + 4 + 3);
  const StoreHello read = decode<StoreHello>(bytes);
  EXPECT_EQ(read.release, "9.0");
  EXPECT_EQ(read.min_version, kMaxVersion + 1);
}

// Arbitrary bytes either decode or throw Error(kInvalidArgument); the sanitizers check the rest.
TEST(ProtocolTest, DamagedMessagesAreRefusedOrSound) {
  const StoreHello hello{.release = "1", .client = 1, .incarnation = Incarnation::self()};
  struct Kind {
    std::vector<std::byte> sound;
    std::function<void(std::span<const std::byte>)> decode;
  };
  const auto kind_of = []<typename Message>(const Message& message) {
    return Kind{message_bytes(message), [](auto bytes) { decode<Message>(bytes); }};
  };
  const std::vector<Kind> kinds = {
      kind_of(full_request()),
      kind_of(hello),
      kind_of(Challenge{.version = 2, .release = "1"}),
      kind_of(StoreWelcome{.version = 2, .release = "1", .proof = Proof{}}),
      kind_of(ProofAnswer{}),
      kind_of(LeaseList{{1, 2, 3}}),
  };
  std::mt19937 random(3);
  int refused = 0;
  for (const Kind& kind : kinds) {
    for (int round = 0; round < 4000; ++round) {
      std::vector<std::byte> bytes = kind.sound;
      for (auto flips = 1 + random() % 3; flips > 0; --flips)
        bytes[random() % bytes.size()] = static_cast<std::byte>(random());
      if (round % 3 == 0) bytes.resize(random() % (bytes.size() + 1));
      try {
        kind.decode(bytes);
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace tessera::store
