#include "base/metrics_server.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <random>

#include "base/metrics.h"
#include "base/testing.h"

namespace tessera {
namespace {

UniqueFd call(const MetricsServer& server) {
  std::string address = server.url();
  address = address.substr(7, address.rfind('/') - 7);
  return connect_tcp(parse_host_port(address), soon());
}

void say(int fd, std::string_view text) {
  auto bytes = std::as_bytes(std::span(text));
  while (!bytes.empty()) {
    ASSERT_TRUE(wait_ready(fd, POLLOUT, soon()));
    bytes = bytes.subspan(send_some(fd, bytes));
  }
}

// All bytes until the other end closes.
std::string hear(int fd) {
  std::string text;
  std::array<std::byte, 4096> buffer;
  while (wait_ready(fd, POLLIN, soon())) {
    try {
      const auto got = receive_some(fd, buffer);
      if (got && *got == 0) break;
      if (got) text.append(reinterpret_cast<const char*>(buffer.data()), *got);
    } catch (const Error&) {  // reset
      break;
    }
  }
  return text;
}

TEST(MetricsServerTest, AnswersAScrapeThatComesInPieces) {
  const MetricsServer server(parse_metrics_address(":0"));
  EXPECT_TRUE(server.url().starts_with("http://127.0.0.1:")) << server.url();
  const UniqueFd fd = call(server);
  say(fd.get(), "GET /metrics HTTP/1.1\r\nHost: x\r\n");
  say(fd.get(), "\r\n");
  const std::string reply = hear(fd.get());
  EXPECT_TRUE(reply.starts_with("HTTP/1.1 200 OK\r\n")) << reply;
  const std::string body = reply.substr(reply.find("\r\n\r\n") + 4);
  EXPECT_NE(reply.find("Content-Length: " + std::to_string(body.size()) + "\r\n"), std::string::npos);
  EXPECT_NE(body.find("tessera_build_info"), std::string::npos);
}

TEST(MetricsServerTest, RefusesWhatIsNoScrape) {
  EXPECT_TRUE(answer_http("GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
  EXPECT_TRUE(answer_http("POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));
  EXPECT_TRUE(answer_http("nonsense\r\n\r\n").starts_with("HTTP/1.1 400 "));
  EXPECT_TRUE(answer_http("GET /metrics\r\n\r\n").starts_with("HTTP/1.1 400 "));
  EXPECT_TRUE(answer_http("\r\n\r\n").starts_with("HTTP/1.1 400 "));
  EXPECT_TRUE(answer_http(std::string(4096, 'x')).starts_with("HTTP/1.1 431 "));
  EXPECT_EQ(answer_http("GET /metrics HTTP/1.1\r\n"), "");
  const std::string head = answer_http("HEAD /metrics?x=1 HTTP/1.0\r\n\r\n");
  EXPECT_TRUE(head.starts_with("HTTP/1.1 200 ") && head.ends_with("\r\n\r\n")) << head;
}

TEST(MetricsServerTest, GarbageAndIdleCallersDoNotKeepItFromAnswering) {
  const MetricsServer server(parse_metrics_address("0"));
  std::mt19937 random(1);
  for (int i = 0; i < 50; ++i) {
    const UniqueFd fd = call(server);
    std::string garbage(1 + random() % 10'000, '\0');
    for (char& c : garbage) c = static_cast<char>(random());
    try {
      say(fd.get(), garbage);
      if (i % 2 == 0) continue;
      ::shutdown(fd.get(), SHUT_WR);
      hear(fd.get());
    } catch (const Error&) {  // the server has hung up
    }
  }
  std::vector<UniqueFd> idle;
  for (int i = 0; i < 15; ++i) idle.push_back(call(server));
  const UniqueFd fd = call(server);
  say(fd.get(), "GET /metrics HTTP/1.1\r\n\r\n");
  EXPECT_TRUE(hear(fd.get()).starts_with("HTTP/1.1 200 OK\r\n"));
}

TEST(MetricsServerTest, ACallerBeyondTheLimitIsAnsweredWhenOneHasGone) {
  const MetricsServer server(parse_metrics_address(":0"));
  std::vector<UniqueFd> idle;
  for (int i = 0; i < 16; ++i) idle.push_back(call(server));
  const UniqueFd fd = call(server);
  say(fd.get(), "GET /metrics HTTP/1.1\r\n\r\n");
  idle.pop_back();
  EXPECT_TRUE(hear(fd.get()).starts_with("HTTP/1.1 200 OK\r\n"));
}

TEST(MetricsServerTest, AnAddressIsLoopbackUnlessWrittenOut) {
  EXPECT_EQ(parse_metrics_address("9400"), (HostPort{"127.0.0.1", 9400}));
  EXPECT_EQ(parse_metrics_address(":9400"), (HostPort{"127.0.0.1", 9400}));
  EXPECT_EQ(parse_metrics_address("0.0.0.0:9400"), (HostPort{"0.0.0.0", 9400}));
  EXPECT_EQ(parse_metrics_address("[::1]:9400"), (HostPort{"::1", 9400}));
  for (const char* bad : {"", ":", "x", "host:", "1:2:3", ":99999"})
    EXPECT_THROW(parse_metrics_address(bad), Error) << bad;
}

TEST(MetricsServerTest, LeavesNoDescriptorBehind) {
  const size_t before = open_fds();
  {
    const MetricsServer server(parse_metrics_address(":0"));
    const UniqueFd fd = call(server);
    say(fd.get(), "GET /metrics HTTP/1.1\r\n\r\n");
    hear(fd.get());
  }
  EXPECT_EQ(open_fds(), before);
}

}  // namespace
}  // namespace tessera
