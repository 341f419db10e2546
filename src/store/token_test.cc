#include "store/token.h"

#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "base/testing.h"
#include "store/test_util.h"
#include "store/token_source.h"

namespace tessera::store {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::Not;

constexpr char kSecret[] = "0123456789abcdef0123456789abcdef";

Handshake counting_handshake() {
  Handshake handshake{.version = 2};
  for (size_t i = 0; i < 32; ++i) {
    handshake.client[i] = static_cast<std::byte>(i);
    handshake.server[i] = static_cast<std::byte>(32 + i);
  }
  return handshake;
}

std::string hex(const Proof& proof) {
  std::string text;
  for (const std::byte byte : proof) text += fmt::format("{:02x}", static_cast<unsigned>(byte));
  return text;
}

// The expected values come from Python's hmac module, over the input that the protocol's page defines.
TEST(TokenTest, ProofsAreTheDocumentedHmac) {
  const Token token(kSecret, "a test");
  EXPECT_EQ(hex(token.prove(Side::kClient, counting_handshake())),
            "de08f16b255bac76093d8f4f21e70768fd2eaa09d3dfe7f6df17024e310075f9");
  EXPECT_EQ(hex(token.prove(Side::kServer, counting_handshake())),
            "ac98159ae9a8ac1656b5a3d89822eaba3938c5d6b1a5fa28cad561a98f0541a7");
}

TEST(TokenTest, AProofHoldsForItsSideItsVersionItsNoncesAndItsTokenAlone) {
  const Token token(kSecret, "a test");
  const Handshake handshake = counting_handshake();
  const Proof proof = token.prove(Side::kClient, handshake);
  EXPECT_TRUE(token.proves(Side::kClient, handshake, proof));
  EXPECT_FALSE(token.proves(Side::kServer, handshake, proof)) << "it can be sent back";

  Handshake other = handshake;
  other.version = 3;
  EXPECT_FALSE(token.proves(Side::kClient, other, proof));
  other = handshake;
  other.client[31] ^= std::byte{1};
  EXPECT_FALSE(token.proves(Side::kClient, other, proof));
  other = handshake;
  std::swap(other.client, other.server);
  EXPECT_FALSE(token.proves(Side::kClient, other, proof));
  Proof damaged = proof;
  damaged[0] ^= std::byte{1};
  EXPECT_FALSE(token.proves(Side::kClient, handshake, damaged));
  EXPECT_FALSE(Token(std::string(kSecret) + "0", "a test").proves(Side::kClient, handshake, proof));
}

TEST(TokenTest, RandomTokensAndNoncesDiffer) {
  EXPECT_EQ(Token::random().secret().size(), 64U);
  EXPECT_NE(Token::random().secret(), Token::random().secret());
  EXPECT_NE(random_nonce(), random_nonce());
}

TEST(TokenTest, ATokenThatIsTooShortIsRefusedBySourceAndNotShown) {
  const std::string error = error_of([] { Token("hunter2", "TESSERA_TOKEN"); });
  EXPECT_THAT(error, HasSubstr("TESSERA_TOKEN has 7 bytes"));
  EXPECT_THAT(error, Not(HasSubstr("hunter2")));
}

class TokenSourceTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = "/tmp/tessera-test-XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string folder_;
};

TEST_F(TokenSourceTest, TheEnvironmentGivesItOrNamesAFile) {
  EXPECT_FALSE(given_token("", ""));
  EXPECT_EQ(given_token(kSecret, "")->secret(), kSecret);
  const std::string file = folder_ + "/secret";
  std::ofstream(file) << kSecret << "\n";
  const std::optional<Token> token = given_token("", file);
  EXPECT_EQ(token->secret(), kSecret);
  EXPECT_THAT(token->source(), HasSubstr(file));
  EXPECT_THAT(error_of([&] { given_token(kSecret, file); }), HasSubstr("both set"));
  EXPECT_THAT(error_of([&] { given_token("", folder_ + "/none"); }), HasSubstr("TESSERA_TOKEN_FILE cannot be read"));
  std::ofstream(file) << "\n" << kSecret;
  EXPECT_THAT(error_of([&] { given_token("", file); }), HasSubstr("has 0 bytes"));
}

TEST_F(TokenSourceTest, AStoresTokenIsFoundByItsAddressAsLongAsItLives) {
  const std::string root = folder_ + "/run";
  EXPECT_FALSE(published_token(root, "tcp://127.0.0.1:1"));
  std::optional<RuntimeDir> first = RuntimeDir::open(root), second = RuntimeDir::open(root);
  publish_token(*first, "tcp://127.0.0.1:1", Token(kSecret, "a test"));
  publish_token(*second, "tcp://127.0.0.1:2", Token::random());
  struct stat status{};
  ASSERT_EQ(::stat(first->path("token").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600U);
  EXPECT_EQ(published_token(root, "tcp://127.0.0.1:1")->secret(), kSecret);
  EXPECT_FALSE(published_token(root, "tcp://127.0.0.1:3"));

  // Like a killed store's folder: the files are there and the lock is free.
  fs::copy(first->own(), root + "/p-0000000000000000");
  first.reset();
  EXPECT_FALSE(published_token(root, "tcp://127.0.0.1:1"));
}

TEST_F(TokenSourceTest, ADamagedFileIsNoToken) {
  const RuntimeDir dir = RuntimeDir::open(folder_ + "/run");
  for (const char* text : {"", "tcp://127.0.0.1:1", "\n", "tcp://127.0.0.1:2 0123456789abcdef0123456789abcdef"}) {
    std::ofstream(dir.path("token")) << text;
    EXPECT_FALSE(published_token(folder_ + "/run", "tcp://127.0.0.1:1")) << text;
  }
  std::ofstream(dir.path("token")) << "tcp://127.0.0.1:1 short";
  EXPECT_THAT(error_of([&] { published_token(folder_ + "/run", "tcp://127.0.0.1:1"); }), HasSubstr("has 5 bytes"));
}

// --- the handshake

Status refusal_in(const Frame& frame) {
  EXPECT_EQ(frame.type, raw(StoreMessage::kRefused));
  return read_message<ReplyHead>(frame.payload, "refusal").status;
}

StoreHello some_hello() {
  return {.release = "test", .client = random_id(), .incarnation = Incarnation::self(), .nonce = random_nonce()};
}

TEST(HandshakeTest, AClientWithAnotherTokenIsRefusedAndOthersNoticeNothing) {
  const auto server = tcp_server();
  const auto client = open_store(server->address());
  RawPeer stranger(*server);
  const Status status = refusal_in(stranger.prove(some_hello(), Token(kSecret, "a test")));
  EXPECT_EQ(status.code(), ErrorCode::kPermissionDenied);
  EXPECT_TRUE(stranger.closed());
  EXPECT_GT(client->put("key", "value"), 0);
}

TEST(HandshakeTest, AProofSentAgainOnAnotherConnectionIsRefused) {
  const auto server = tcp_server();
  const StoreHello hello = some_hello();
  RawPeer first(*server);
  first.send(raw(StoreMessage::kHello), message_bytes(hello));
  const Challenge challenge = decode<Challenge>(first.receive().payload);
  const Proof proof =
      kToken.prove(Side::kClient, {.version = challenge.version, .client = hello.nonce, .server = challenge.nonce});
  RawPeer again(*server);
  again.send(raw(StoreMessage::kHello), message_bytes(hello));
  again.receive();
  again.send(raw(StoreMessage::kProof), message_bytes(ProofAnswer{proof}));
  EXPECT_EQ(refusal_in(again.receive()).code(), ErrorCode::kPermissionDenied);
  first.send(raw(StoreMessage::kProof), message_bytes(ProofAnswer{proof}));
  EXPECT_EQ(first.receive().type, raw(StoreMessage::kWelcome));
}

TEST(HandshakeTest, BeforeItsProofAClientCanDoNothing) {
  const auto server = tcp_server();
  const auto client = open_store(server->address());
  StoreHello boastful = some_hello();
  boastful.last_revision = kMaxContinued;
  struct Case {
    const char* name;
    StoreMessage type;
    std::vector<std::byte> payload;
  };
  const std::vector<Case> cases = {
      {"asks", StoreMessage::kRequest, message_bytes(Request{.id = 1, .op = Op::kRange, .key = "a"})},
      {"says hello again", StoreMessage::kHello, message_bytes(boastful)},
      {"publishes", StoreMessage::kRepublishDone, {}},
      {"sends an empty proof", StoreMessage::kProof, {}},
      {"sends a long proof", StoreMessage::kProof, std::vector<std::byte>(kMaxHelloBytes)},
      {"sends too much", StoreMessage::kProof, std::vector<std::byte>(kMaxHelloBytes + 1)},
  };
  for (const Case& hostile : cases) {
    RawPeer peer(*server);
    peer.send(raw(StoreMessage::kHello), message_bytes(boastful));
    EXPECT_EQ(peer.receive().type, raw(StoreMessage::kChallenge));
    peer.send(raw(hostile.type), hostile.payload);
    EXPECT_TRUE(peer.closed()) << hostile.name;
  }
  EXPECT_EQ(client->put("key", "value"), 1) << "what an unproved hello claimed was believed";
}

TEST(HandshakeTest, AConnectionThatDoesNotSayWhoItIsHasAShortTime) {
  FakeClock clock;
  ServerOptions options;
  options.clock = &clock;
  const auto server = tcp_server(options);
  RawPeer silent(*server), halfway(*server), proved(*server);
  proved.greet();
  halfway.send(raw(StoreMessage::kHello), message_bytes(some_hello()));
  EXPECT_EQ(halfway.receive().type, raw(StoreMessage::kChallenge));
  run_on(*server, [&] { clock.advance(options.greeting); });
  EXPECT_TRUE(silent.closed());
  EXPECT_TRUE(halfway.closed());
  proved.send(raw(StoreMessage::kRequest), message_bytes(Request{.id = 1, .op = Op::kRange, .key = "a"}));
  EXPECT_EQ(proved.receive().type, raw(StoreMessage::kReply));
}

TEST(HandshakeTest, OfTooManySilentConnectionsTheOldestGoAndAClientGetsIn) {
  ServerOptions options;
  options.max_greeting = 4;
  const auto server = tcp_server(options);
  std::vector<std::unique_ptr<RawPeer>> silent;
  for (int i = 0; i < 12; ++i) silent.push_back(std::make_unique<RawPeer>(*server));
  EXPECT_GT(open_store(server->address())->put("key", "value"), 0);
  for (size_t i = 0; i < 8; ++i) EXPECT_TRUE(silent[i]->closed()) << i;
}

TEST(HandshakeTest, AStoreThatCannotProveItselfIsNotBelieved) {
  ServerOptions other_token;
  other_token.token.emplace(kSecret, "a test");
  const auto other = tcp_server(other_token);
  const std::string refused = error_of([&] { open_store(other->address()); });
  EXPECT_THAT(refused, HasSubstr("permission-denied"));
  EXPECT_THAT(refused, HasSubstr(other->address()));
  EXPECT_THAT(refused, HasSubstr("does not accept the token from TESSERA_TOKEN"));
  EXPECT_THAT(refused, Not(HasSubstr(kToken.secret())));

  // A server that lets everybody in, like one that has stolen the port.
  UniqueFd listener = listen_tcp({"127.0.0.1", 0});
  const std::string url = fmt::format("tcp://127.0.0.1:{}", local_port(listener.get()));
  const Server open(std::move(listener), url, {});
  const std::string disbelieved = error_of([&] { open_store(url); });
  EXPECT_THAT(disbelieved, HasSubstr("permission-denied"));
  EXPECT_THAT(disbelieved, HasSubstr("does not know the token from TESSERA_TOKEN"));
}

// A server that sends the client's own proof back, or one that it made up.
TEST(HandshakeTest, AReflectedProofIsNotBelieved) {
  const UniqueFd listener = listen_tcp({"127.0.0.1", 0});
  const std::string url = fmt::format("tcp://127.0.0.1:{}", local_port(listener.get()));
  std::thread thief([&] {
    ASSERT_TRUE(wait_ready(listener.get(), POLLIN, soon()));
    const UniqueFd fd = accept_connection(listener.get());
    FrameReader reader(kMagic, {});
    FrameWriter writer(kMagic, kHelloVersion, size_t{1} << 20);
    const StoreHello hello = decode<StoreHello>(wait_frame(fd.get(), reader, soon()).payload);
    writer.push(raw(StoreMessage::kChallenge),
                message_bytes(Challenge{.version = kMaxVersion, .release = "stolen", .nonce = hello.nonce}));
    writer.flush(fd.get(), soon());
    const Proof proof = decode<ProofAnswer>(wait_frame(fd.get(), reader, soon()).payload).proof;
    writer.push(
        raw(StoreMessage::kWelcome),
        message_bytes(StoreWelcome{.version = kMaxVersion, .release = "stolen", .instance = 1, .proof = proof}));
    writer.flush(fd.get(), soon());
  });
  EXPECT_THAT(error_of([&] { open_store(url); }), HasSubstr("does not know the token"));
  thief.join();
}

}  // namespace
}  // namespace tessera::store
