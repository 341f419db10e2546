#include "store/protocol.h"

#include <gtest/gtest.h>

#include <functional>
#include <random>

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

TEST(ProtocolTest, ARequestReadsBackAsWritten) {
  const Request request = full_request();
  const Request read = Request::decode(request.encode());
  EXPECT_EQ(read.id, 9U);
  EXPECT_EQ(read.token, 77U);
  ASSERT_EQ(read.transaction.operations.size(), 2U);
  EXPECT_EQ(read.transaction.operations[0].value, request.transaction.operations[0].value);
  EXPECT_TRUE(read.transaction.operations[0].options.decision);
  EXPECT_EQ(read.transaction.operations[1].type, StoreOperation::Type::kDelete);
  EXPECT_EQ(read.transaction.compares[0].mod_revision, 3);
}

TEST(ProtocolTest, AHelloReadsBackAsWritten) {
  const StoreHello hello{.release = "1.2",
                         .client = 4,
                         .last_instance = 5,
                         .last_revision = 6,
                         .incarnation = Incarnation::self(),
                         .nonce = random_nonce()};
  const StoreHello read = StoreHello::decode(hello.encode());
  EXPECT_EQ(read.release, "1.2");
  EXPECT_EQ(read.client, 4U);
  EXPECT_EQ(read.last_revision, 6);
  EXPECT_EQ(read.incarnation, Incarnation::self());
  EXPECT_EQ(read.nonce, hello.nonce);
}

TEST(ProtocolTest, TheAnswersToAHelloReadBackAsWritten) {
  const Challenge challenge{.version = 2, .release = "1.2", .nonce = random_nonce()};
  EXPECT_EQ(Challenge::decode(challenge.encode()).version, 2);
  EXPECT_EQ(Challenge::decode(challenge.encode()).nonce, challenge.nonce);
  StoreWelcome welcome{.version = 2, .release = "1.2", .instance = 5};
  EXPECT_EQ(StoreWelcome::decode(welcome.encode()).proof, std::nullopt);
  welcome.proof = random_nonce();
  EXPECT_EQ(StoreWelcome::decode(welcome.encode()).instance, 5U);
  EXPECT_EQ(StoreWelcome::decode(welcome.encode()).proof, welcome.proof);
  EXPECT_EQ(decode_proof(encode_proof(*welcome.proof)), *welcome.proof);
}

TEST(ProtocolTest, OfAHelloWithoutACommonVersionOnlyTheBeginningIsRead) {
  StoreHello hello{.min_version = kMaxVersion + 1, .max_version = kMaxVersion + 4, .release = "9.0"};
  auto bytes = hello.encode();
  bytes.resize(2 + 2 + 4 + 3);
  const StoreHello read = StoreHello::decode(bytes);
  EXPECT_EQ(read.release, "9.0");
  EXPECT_EQ(read.min_version, kMaxVersion + 1);
}

// Whatever a stranger sends ends in a value or in Error(kInvalidArgument); the sanitizers watch the rest.
TEST(ProtocolTest, DamagedMessagesAreRefusedOrSound) {
  const StoreHello hello{.release = "1", .client = 1, .incarnation = Incarnation::self()};
  const std::vector<LeaseId> leases{1, 2, 3};
  struct Kind {
    std::vector<std::byte> sound;
    std::function<void(std::span<const std::byte>)> decode;
  };
  const std::vector<Kind> kinds = {
      {full_request().encode(), [](auto bytes) { Request::decode(bytes); }},
      {hello.encode(), [](auto bytes) { StoreHello::decode(bytes); }},
      {Challenge{.version = 2, .release = "1"}.encode(), [](auto bytes) { Challenge::decode(bytes); }},
      {StoreWelcome{.version = 2, .release = "1", .proof = Proof{}}.encode(),
       [](auto bytes) { StoreWelcome::decode(bytes); }},
      {encode_proof(Proof{}), [](auto bytes) { decode_proof(bytes); }},
      {encode_leases(leases), [](auto bytes) { decode_leases(bytes); }},
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
