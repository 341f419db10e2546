// A store and real processes that are stopped, killed and run out of descriptors.
#include <sys/resource.h>

#include <filesystem>
#include <random>

#include "base/testing.h"
#include "store/test_actor.h"

namespace tessera::store {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

// A process that hosts a server and answers "url" with its address. `descriptors`: its limit.
std::unique_ptr<Actor> serving(const std::string& url, const std::string& folder = {}, rlim_t descriptors = 0) {
  return std::make_unique<Actor>([=]() -> Actor::Script {
    if (descriptors > 0) {
      const rlimit limit{.rlim_cur = descriptors, .rlim_max = descriptors};
      ::setrlimit(RLIMIT_NOFILE, &limit);
    }
    std::shared_ptr<StoreServer> server = serve_store(url, {.data_dir = folder});
    return [server](const std::string&) { return server->address(); };
  });
}

std::unique_ptr<Actor> client_of(const std::string& url, const std::string& root = {}) {
  return std::make_unique<Actor>([=] { return store_script(url, root); });
}

class FaultTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = "/tmp/tessera-test-XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string folder_;
};

TEST_F(FaultTest, AStoppedHostEndsCallsAtTheirDeadlinesAndGoesOnLater) {
  const auto host = client_of("auto", folder_);
  EXPECT_EQ(host->ask("decide epoch yes"), "yes");
  const auto other = client_of("auto", folder_);
  EXPECT_EQ(other->ask("get epoch"), "yes");
  host->signal(SIGSTOP);
  EXPECT_THAT(other->ask("try epoch"), HasSubstr("store auto: get 'epoch': no answer within 0.05 s"));
  other->tell("decide epoch no");
  host->signal(SIGCONT);
  EXPECT_EQ(other->hear(), "yes");
  EXPECT_EQ(other->end(), 0);
  EXPECT_EQ(host->end(), 0);
  EXPECT_TRUE(fs::is_empty(folder_));
}

TEST_F(FaultTest, AClientStoppedBeyondItsLeaseComesBackWithItsKeys) {
  const auto server = serving("tcp://127.0.0.1:0");
  const std::string url = server->ask("url");
  const auto owner = client_of(url), witness = client_of(url);
  EXPECT_EQ(owner->ask("brief rank/0 in"), "ok");
  EXPECT_EQ(witness->ask("wait rank/ 1"), "ok");
  owner->signal(SIGSTOP);
  EXPECT_EQ(witness->ask("gone rank/"), "ok");
  owner->signal(SIGCONT);
  EXPECT_EQ(witness->ask("wait rank/ 1"), "ok");
  EXPECT_EQ(witness->ask("get rank/0"), "in");
}

// With state on disk and without: keys and decisions of clients are there again, and a wait goes on.
TEST_F(FaultTest, AStoreThatIsKilledIsContinuedByTheNextAtItsPlace) {
  for (const std::string& data : {std::string(), folder_ + "/data"}) {
    auto server = serving("tcp://127.0.0.1:0", data);
    const std::string url = server->ask("url");
    const auto first = client_of(url), second = client_of(url);
    for (int round = 0; round < 2; ++round) {
      const std::string epoch = fmt::format("epoch/{}", round), rank = fmt::format("rank/{}", round);
      EXPECT_EQ(first->ask("own " + rank + " in"), "ok");
      EXPECT_EQ(first->ask("put plain/key v"), "ok");
      EXPECT_EQ(second->ask("decide " + epoch + " commit"), "commit");
      const std::string revision = second->ask("revision " + epoch);
      second->tell(fmt::format("wait go/{} 1", round));
      server->kill();
      server = serving(url, data);
      EXPECT_EQ(first->ask("decide " + epoch + " abort"), "commit");
      EXPECT_EQ(first->ask("revision " + epoch), revision);
      EXPECT_EQ(first->ask("get " + rank), "in");
      EXPECT_EQ(first->ask("get plain/key"), data.empty() ? "nothing" : "v");
      EXPECT_EQ(first->ask(fmt::format("put go/{} now", round)), "ok");
      EXPECT_EQ(second->hear(), "ok");
    }
  }
}

TEST_F(FaultTest, AServerWithoutDescriptorsServesThoseItHasAndLetsOthersIn) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "without a descriptor, the sanitizer's check of an object's type fails: it opens a pipe";
#endif
  const auto server = serving("tcp://127.0.0.1:0", {}, 40);
  const std::string url = server->ask("url");
  const auto client = client_of(url);
  EXPECT_EQ(client->ask("put key 1"), "ok");
  std::vector<std::unique_ptr<RawPeer>> silent;
  for (int i = 0; i < 100; ++i) silent.push_back(std::make_unique<RawPeer>(parse_host_port(url.substr(6))));
  EXPECT_EQ(client->ask("put key 2"), "ok");
  EXPECT_EQ(client_of(url)->ask("get key"), "2");

  // Clients that have proved their token stay, and those beyond the limit wait.
  std::vector<std::unique_ptr<RawPeer>> proved;
  for (int i = 0; i < 20; ++i) proved.push_back(std::make_unique<RawPeer>(parse_host_port(url.substr(6))));
  for (const auto& peer : proved) peer->greet();
  EXPECT_EQ(client->ask("put key 3"), "ok");
}

TEST_F(FaultTest, GarbageOfEveryLengthHarmsNobody) {
  const auto server = serving("tcp://127.0.0.1:0");
  const std::string url = server->ask("url");
  const auto client = client_of(url);
  std::mt19937 random(17);
  for (int round = 0; round < 200; ++round) {
    RawPeer peer(parse_host_port(url.substr(6)));
    ByteWriter garbage;
    if (round % 2 == 0) garbage.put(kMagic);
    if (round % 4 == 0) garbage.put(uint32_t{raw(StoreMessage::kHello)} << 16);
    for (size_t left = random() % 300; left > 0; --left) garbage.put(static_cast<uint8_t>(random()));
    const Status sent = status_of([&] { peer.send_raw(garbage.view()); });
    EXPECT_TRUE(sent.ok() || sent.code() == ErrorCode::kPeerLost) << sent.message();
    if (round % 3 == 0) peer.end_sending();
  }
  EXPECT_EQ(client->ask("put key 1"), "ok");
  EXPECT_EQ(client_of(url)->ask("get key"), "1");
}

}  // namespace
}  // namespace tessera::store
