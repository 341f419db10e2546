#include "base/socket.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <functional>

#include "base/fail.h"
#include "base/testing.h"

namespace tessera {
namespace {

using testing::HasSubstr;

class SocketTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = "/tmp/tessera-test-XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string folder_;
};

bool close_on_exec(int fd) {
  return (::fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0;
}
bool non_blocking(int fd) {
  return (::fcntl(fd, F_GETFL) & O_NONBLOCK) != 0;
}

TEST(HostPortTest, ParsesAndPrints) {
  EXPECT_EQ(parse_host_port("127.0.0.1:7070"), (HostPort{"127.0.0.1", 7070}));
  EXPECT_EQ(parse_host_port("node-7.cluster:0"), (HostPort{"node-7.cluster", 0}));
  EXPECT_EQ(parse_host_port("[::1]:65535"), (HostPort{"::1", 65535}));
  EXPECT_EQ(parse_host_port("[::1]:80").to_string(), "[::1]:80");
}

TEST(HostPortTest, QuotesWhatIsWrong) {
  for (const char* text : {"", "host", ":80", "host:", "host:x", "host:65536", "host:-1", "host:80x", "::1:80", "[]:80",
                           "[[host]]:80", "[host:80", "host]:80", "a host:80"})
    EXPECT_THAT(error_of([&] { parse_host_port(text); }), HasSubstr(fmt::format("'{}'", text)));
  EXPECT_THAT(error_of([] { parse_host_port(std::string_view("127.0.0.1\0.example:80", 22)); }),
              HasSubstr("is not HOST:PORT"));
}

TEST_F(SocketTest, TcpCarriesBytesBothWays) {
  const UniqueFd listener = listen_tcp({"127.0.0.1", 0});
  const UniqueFd client = connect_tcp({"127.0.0.1", local_port(listener.get())}, soon());
  ASSERT_TRUE(wait_ready(listener.get(), POLLIN, soon()));
  const UniqueFd server = accept_connection(listener.get());
  EXPECT_FALSE(accept_connection(listener.get()));
  for (const int fd : {listener.get(), client.get(), server.get()}) {
    EXPECT_TRUE(close_on_exec(fd));
    EXPECT_TRUE(non_blocking(fd));
  }
  const std::string text = "hello";
  EXPECT_EQ(send_some(client.get(), std::as_bytes(std::span(text))), text.size());
  ASSERT_TRUE(wait_ready(server.get(), POLLIN, soon()));
  std::array<std::byte, 64> buffer;
  EXPECT_EQ(receive_some(server.get(), buffer), text.size());
  EXPECT_EQ(receive_some(server.get(), buffer), std::nullopt);
}

TEST_F(SocketTest, ARefusedConnectionIsUnavailableAndNamesTheAddress) {
  uint16_t port = 0;
  {
    port = local_port(listen_tcp({"127.0.0.1", 0}).get());
  }
  const std::string error = error_of([&] { connect_tcp({"127.0.0.1", port}, soon()); });
  EXPECT_THAT(error, HasSubstr("unavailable"));
  EXPECT_THAT(error, HasSubstr(fmt::format("127.0.0.1:{}", port)));
  EXPECT_THAT(error_of([&] { connect_unix(folder_ + "/nobody", soon()); }), HasSubstr("unavailable"));
}

TEST_F(SocketTest, AUnixSocketIsPrivateAndKnowsItsUser) {
  const std::string path = folder_ + "/s";
  const UniqueFd listener = listen_unix(path);
  struct stat status{};
  ASSERT_EQ(::stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600U);
  const UniqueFd client = connect_unix(path, soon());
  const UniqueFd server = accept_connection(listener.get());
  EXPECT_TRUE(non_blocking(client.get()));
  EXPECT_EQ(require_same_user(client.get()), ::getpid());
  EXPECT_EQ(require_same_user(server.get()), ::getpid());
}

TEST_F(SocketTest, AnotherUsersProcessIsRefusedEvenWhereTheSocketLetsItIn) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  const std::string path = folder_ + "/s";
  const UniqueFd listener = listen_unix(path);
  ASSERT_EQ(::chmod(folder_.c_str(), 0755), 0);
  ASSERT_EQ(::chmod(path.c_str(), 0666), 0);
  const pid_t other = ::fork();
  if (other == 0) {
    const bool changed = ::setresuid(65534, 65534, 65534) == 0;
    const std::string error = changed ? error_of([&] {
      const UniqueFd fd = connect_unix(path, soon());
      require_same_user(fd.get());
    })
                                      : "";
    ::_exit(error.find("runs as uid 0") != std::string::npos ? 0 : 1);
  }
  ASSERT_TRUE(wait_ready(listener.get(), POLLIN, soon()));
  const UniqueFd server = accept_connection(listener.get());
  EXPECT_THAT(error_of([&] { require_same_user(server.get()); }), HasSubstr("runs as uid 65534"));
  int status = -1;
  ::waitpid(other, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST_F(SocketTest, AFullBacklogEndsAtTheDeadline) {
  const std::string path = folder_ + "/s";
  const UniqueFd listener = listen_unix(path);
  ASSERT_EQ(::listen(listener.get(), 0), 0);
  const UniqueFd first = connect_unix(path, soon());
  EXPECT_THAT(error_of([&] { connect_unix(path, Deadline::after(std::chrono::milliseconds(20))); }),
              HasSubstr("deadline-exceeded"));
}

TEST_F(SocketTest, ATooLongPathIsRefusedWithBothSizes) {
  const auto listen_at = [&](size_t bytes) {
    return listen_unix(folder_ + "/" + std::string(bytes - folder_.size() - 1, 'x'));
  };
  EXPECT_TRUE(listen_at(SocketAddress::kMaxPathBytes));
  EXPECT_THAT(error_of([&] { listen_at(SocketAddress::kMaxPathBytes + 1); }),
              HasSubstr("has 108 bytes, a Unix socket takes 1 to 107: choose a shorter one"));
}

TEST_F(SocketTest, DescriptorsTravelAndAreCloseOnExec) {
  const SocketPair pair = socket_pair();
  std::vector<UniqueFd> own;
  std::vector<int> sent;
  for (size_t i = 0; i < kMaxFdsPerMessage; ++i) {
    own.push_back(duplicate_fd(pair.first.get()));
    sent.push_back(own.back().get());
  }
  const std::array<std::byte, 1> one{};
  ASSERT_EQ(send_some(pair.first.get(), one, sent), 1U);
  std::array<std::byte, 8> buffer;
  std::vector<UniqueFd> received;
  ASSERT_EQ(receive_some(pair.second.get(), buffer, &received), 1U);
  ASSERT_EQ(received.size(), kMaxFdsPerMessage);
  for (const UniqueFd& fd : received) EXPECT_TRUE(close_on_exec(fd.get()));
  sent.push_back(sent.front());
  EXPECT_THAT(error_of([&] { send_some(pair.first.get(), one, sent); }), HasSubstr("descriptors in one message"));
}

TEST_F(SocketTest, DescriptorsNobodyAskedForAreClosed) {
  const SocketPair pair = socket_pair();
  const size_t before = open_fds();
  const std::array<std::byte, 1> one{};
  const std::array<int, 2> fds{pair.first.get(), pair.first.get()};
  ASSERT_EQ(send_some(pair.first.get(), one, fds), 1U);
  std::array<std::byte, 8> buffer;
  ASSERT_EQ(receive_some(pair.second.get(), buffer), 1U);
  EXPECT_EQ(open_fds(), before);
}

TEST_F(SocketTest, DescriptorsBeyondTheLimitOfOpenFilesFailWithoutALeak) {
  const SocketPair pair = socket_pair();
  const size_t before = open_fds();
  const std::array<std::byte, 1> one{};
  const std::vector<int> fds(50, pair.first.get());
  ASSERT_EQ(send_some(pair.first.get(), one, fds), 1U);
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  rlimit tight = limit;
  tight.rlim_cur = static_cast<rlim_t>(pair.second.get()) + 20;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &tight), 0);
  std::array<std::byte, 8> buffer;
  std::vector<UniqueFd> received;
  const std::string error = error_of([&] { receive_some(pair.second.get(), buffer, &received); });
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_THAT(error, HasSubstr("ulimit -n"));
  EXPECT_TRUE(received.empty());
  EXPECT_EQ(open_fds(), before);
}

TEST_F(SocketTest, AClosedPeerIsLost) {
  SocketPair pair = socket_pair();
  pair.second.reset();
  const std::array<std::byte, 1> one{};
  EXPECT_THAT(error_of([&] { send_some(pair.first.get(), one); }), HasSubstr("peer-lost"));
  std::array<std::byte, 8> buffer;
  EXPECT_EQ(receive_some(pair.first.get(), buffer), 0U);
}

}  // namespace
}  // namespace tessera
