// A running server with misbehaving peers.
#include "store/server/server.h"

#include <random>
#include <thread>

#include "store/test_util.h"

namespace tessera::store {
namespace {

using testing::HasSubstr;

constexpr auto kForLargeValues = std::chrono::minutes(1);  // under load

std::vector<std::byte> bytes_of(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

TEST(ServerTest, HostilePeersAreClosedAndAClientAmongThemNoticesNothing) {
  const auto server = tcp_server();
  const auto client = open_store(server->address());
  Request endless;
  endless.id = 1;
  endless.key = "a";
  auto trailing = message_bytes(endless);
  trailing.push_back(std::byte{0});

  struct Case {
    const char* name;
    bool greets;
    std::function<void(RawPeer&)> act;
  };
  const std::vector<Case> cases = {
      {"speaks HTTP", false, [](RawPeer& peer) { peer.send_raw(bytes_of("GET / HTTP/1.1\r\nHost: store\r\n\r\n")); }},
      {"asks before its hello", false,
       [&](RawPeer& peer) { peer.send(raw(StoreMessage::kRequest), message_bytes(endless)); }},
      {"sends an empty hello", false, [](RawPeer& peer) { peer.send(raw(StoreMessage::kHello), {}); }},
      {"announces a hello of 4 GB", false,
       [](RawPeer& peer) {
         ByteWriter out;
         out.put(kMagic);
         out.put<uint32_t>(raw(StoreMessage::kHello) << 16);
         out.put<uint32_t>(0xfffffff0);
         out.put<uint32_t>(0);
         peer.send_raw(out.view());
       }},
      {"ends inside a frame", false,
       [](RawPeer& peer) {
         ByteWriter out;
         out.put(kMagic);
         peer.send_raw(out.view());
         peer.end_sending();
       }},
      {"sends an unknown message", true, [](RawPeer& peer) { peer.send(999, {}); }},
      {"sends an unknown operation", true,
       [](RawPeer& peer) {
         ByteWriter out;
         out.put<uint64_t>(1);
         out.put<uint8_t>(200);
         peer.send(raw(StoreMessage::kRequest), out.take());
       }},
      {"sends a key without a key", true,
       [](RawPeer& peer) { peer.send(raw(StoreMessage::kRequest), message_bytes(Request{})); }},
      {"sends bytes behind a request", true, [&](RawPeer& peer) { peer.send(raw(StoreMessage::kRequest), trailing); }},
      {"publishes again what cannot be", true,
       [](RawPeer& peer) {
         ByteWriter out;
         out.put<uint32_t>(1'000'000);
         peer.send(raw(StoreMessage::kRepublishKeys), out.take());
       }},
      {"says hello twice", true, [](RawPeer& peer) { peer.send(raw(StoreMessage::kHello), {}); }},
  };
  for (const Case& hostile : cases) {
    RawPeer peer(*server);
    if (hostile.greets) peer.greet();
    hostile.act(peer);
    EXPECT_TRUE(peer.closed()) << hostile.name;
    EXPECT_GT(client->put("key", hostile.name), 0) << hostile.name;
  }
  EXPECT_EQ(client->get("key")->value, cases.back().name);
}

TEST(ServerTest, RandomFramesHarmNobody) {
  const auto server = tcp_server();
  const auto client = open_store(server->address());
  std::mt19937 random(5);
  for (int round = 0; round < 100; ++round) {
    RawPeer peer(*server);
    peer.greet();
    std::vector<std::byte> payload(random() % 200);
    for (std::byte& byte : payload) byte = static_cast<std::byte>(random() % 4);
    const Status sent = status_of([&] {
      for (int i = 0; i < 5; ++i) peer.send(static_cast<uint16_t>(random() % 10), payload);
    });
    EXPECT_TRUE(sent.ok() || sent.code() == ErrorCode::kPeerLost) << sent.message();
  }
  EXPECT_GT(client->put("still", "here"), 0);
}

TEST(ServerTest, ReleasesWithoutACommonProtocolAreBothNamed) {
  const auto server = tcp_server();
  RawPeer peer(*server);
  peer.send(raw(StoreMessage::kHello),
            message_bytes(StoreHello{.min_version = 700, .max_version = 701, .release = "99.1"}));
  const Frame frame = peer.receive();
  ASSERT_EQ(frame.type, raw(StoreMessage::kRefused));
  const Status status = read_message<ReplyHead>(frame.payload, "refusal").status;
  EXPECT_EQ(status.code(), ErrorCode::kMismatch);
  EXPECT_THAT(status.message(), HasSubstr("99.1"));
  EXPECT_THAT(status.message(), HasSubstr(std::string(release())));
  EXPECT_TRUE(peer.closed());
}

// A small request must not make the store copy gigabytes.
TEST(ServerTest, ATransactionThatFailsShowsNoMoreThanAReplyTakes) {
  const auto server = tcp_server();
  const auto client = open_store(server->address());
  client->put("large", std::string(kMaxStoreValueBytes, 'x'), {}, kForLargeValues);
  StoreTransaction transaction;
  transaction.compares.assign(100, {.key = "large", .mod_revision = 999});
  const Status status = status_of([&] { client->transact(transaction, kForLargeValues); });
  EXPECT_EQ(status.code(), ErrorCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("what the transaction compares holds"));
  transaction.compares.resize(2);
  EXPECT_FALSE(client->transact(transaction, kForLargeValues).succeeded);
}

TEST(ServerTest, AWatcherThatDoesNotReadIsDisconnectedAndNobodyElse) {
  ServerOptions options;
  options.max_queued_bytes = 1 << 20;
  const auto server = tcp_server(std::move(options));
  RawPeer sleeper(*server);
  sleeper.greet();
  sleeper.send(raw(StoreMessage::kWatch), message_bytes(WatchStart{.watch = 1, .prefix = "big/", .from = 1}));
  // Its answer proves that the watch is set up.
  sleeper.send(raw(StoreMessage::kRequest), message_bytes(Request{.id = 1, .op = Op::kRange, .key = "big/"}));
  EXPECT_EQ(sleeper.receive().type, raw(StoreMessage::kReply));

  const auto client = open_store(server->address());
  const std::string value(1 << 20, 'v');
  for (int i = 0; i < 40; ++i) client->put(fmt::format("big/{}", i % 4), value);
  EXPECT_TRUE(sleeper.closed());
  EXPECT_EQ(client->range("big/").items.size(), 4U);
}

TEST(ServerTest, AnswersThatAreReadLateCostNobodyTheConnection) {
  ServerOptions options;
  options.max_queued_bytes = 1 << 20;
  const auto server = tcp_server(std::move(options));
  const auto client = open_store(server->address());
  for (int i = 0; i < 4; ++i) client->put(fmt::format("big/{}", i), std::string(4 << 20, 'v'));

  RawPeer late(*server);
  late.greet();
  const WatchStart watch{.watch = 1, .prefix = "small/", .from = client->put("small/key", "before") + 1};
  late.send(raw(StoreMessage::kWatch), message_bytes(watch));
  constexpr uint64_t kRequests = 6;  // more than the sockets' buffers hold
  for (uint64_t id = 1; id <= kRequests; ++id)
    late.send(raw(StoreMessage::kRequest),
              message_bytes(Request{.id = id, .op = Op::kRange, .key = "big/", .prefix = true}));
  client->put("small/key", "after");

  uint64_t answered = 0;
  bool told = false;
  while (answered < kRequests || !told) {
    const Frame frame = late.receive();
    ByteReader in(frame.payload, "frame");
    if (frame.type == raw(StoreMessage::kEvents)) {
      told = true;
    } else {
      ASSERT_EQ(frame.type, raw(StoreMessage::kReply));
      const auto head = read_fields<ReplyHead>(in);
      EXPECT_EQ(head.request, ++answered);
      EXPECT_TRUE(head.status.ok());
    }
  }
}

TEST(ServerTest, AHelloThatClaimsTheLastRevisionLeavesTheStoreInUse) {
  const auto server = tcp_server();
  const auto client = open_store(server->address());
  RawPeer peer(*server);
  peer.greet(
      StoreHello{.release = "test", .client = 5, .last_revision = kMaxRevision, .incarnation = Incarnation::self()});
  EXPECT_GT(client->put("key", "value", {}, kLimit), 0);
  EXPECT_EQ(open_store(server->address())->get("key", kLimit)->value, "value");
}

TEST(ServerTest, ALostReplyIsRepeatedAndNotDoneTwice) {
  const auto server = tcp_server();
  Request request;
  request.op = Op::kTransact;
  request.token = 4711;
  request.transaction.compares.push_back({.key = "lock", .mod_revision = 0});
  request.transaction.operations.push_back(
      {.type = StoreOperation::Type::kPut, .key = "lock", .value = "mine", .options = {}});
  for (const uint64_t id : {1, 2}) {  // the second time over a new connection, as after a loss
    request.id = id;
    RawPeer peer(*server);
    peer.greet();
    peer.send(raw(StoreMessage::kRequest), message_bytes(request));
    const Frame frame = peer.receive();
    ByteReader in(frame.payload, "reply");
    const auto head = read_fields<ReplyHead>(in);
    EXPECT_EQ(head.request, id);
    EXPECT_TRUE(head.status.ok());
    const auto reply = read_fields<TransactReply>(in);
    EXPECT_TRUE(reply.succeeded);
    EXPECT_EQ(reply.revision, 1);
  }
}

TEST(ServerTest, AServerThatFollowsAnotherHoldsRequestsUntilAllAreBack) {
  FakeClock clock;  // it does not advance: the time for republication never runs out
  ServerOptions options;
  options.clock = &clock;
  options.awaited = {{.client = 1001, .incarnation = Incarnation::self()},
                     {.client = 1002, .incarnation = Incarnation::self()}};
  options.revision_floor = 5;
  const auto server = tcp_server(std::move(options));

  RawPeer stranger(*server);
  stranger.greet();
  Request list{.id = 8, .op = Op::kRange, .key = "k", .prefix = true};
  stranger.send(raw(StoreMessage::kRequest), message_bytes(list));

  RawPeer first(*server);
  first.greet(1001);
  const KeyValue kv{.key = "k", .value = "v", .create_revision = 2, .mod_revision = 4, .version = 3, .decision = true};
  RawPeer second(*server);
  second.greet(1002);
  first.send(raw(StoreMessage::kRepublishKeys), message_bytes(KeyList{{kv}}));
  first.send(raw(StoreMessage::kRepublishDone), {});
  second.send(raw(StoreMessage::kRepublishDone), {});
  const Frame frame = stranger.receive();
  ByteReader in(frame.payload, "reply");
  const auto head = read_fields<ReplyHead>(in);
  EXPECT_EQ(head.request, 8U);
  ASSERT_TRUE(head.status.ok());
  const auto reply = read_fields<RangeReply>(in);
  EXPECT_EQ(reply.revision, kRevisionsPerStore);
  EXPECT_EQ(reply.keys, std::vector{kv});
}

TEST(ServerTest, AServerThatFollowsAnotherAnswersAfterASecondEvenSo) {
  FakeClock clock;
  ServerOptions options;
  options.clock = &clock;
  options.awaited = {{.client = 1001, .incarnation = Incarnation::self()}};
  const auto server = tcp_server(std::move(options));
  RawPeer peer(*server);
  peer.greet();
  peer.send(raw(StoreMessage::kRequest), message_bytes(Request{.id = 8, .op = Op::kRange, .key = "k"}));
  run_on(*server, [&] { clock.advance(seconds(1)); });
  EXPECT_EQ(peer.receive().type, raw(StoreMessage::kReply));
}

TEST(ServerTest, ListensWhereItSays) {
  const auto server = serve_store("127.0.0.1:0");
  EXPECT_THAT(server->address(), testing::StartsWith("tcp://127.0.0.1:"));
  EXPECT_GT(open_store(server->address())->put("a", "b"), 0);
  EXPECT_EQ(status_of([&] { serve_store(server->address()); }).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(status_of([] { serve_store("http://x:1"); }).code(), ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace tessera::store
