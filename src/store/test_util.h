// Helpers for the store's tests.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "base/fail.h"
#include "base/framing.h"
#include "base/mutex.h"
#include "base/socket.h"
#include "base/testing.h"
#include "store/protocol.h"
#include "store/server/server.h"

namespace tessera::store {

inline constexpr auto kLimit = std::chrono::seconds(60);  // for every wait that should succeed

// The servers and clients of these tests share one token; it is in the environment before anything reads that.
inline const Token kToken = [] {
  ::setenv("TESSERA_TOKEN", "the token of the store's tests", 1);
  return Token("the token of the store's tests", "the tests");
}();

inline std::unique_ptr<Server> tcp_server(ServerOptions options = {}, uint16_t port = 0) {
  if (!options.token) options.token = kToken;
  UniqueFd listener = listen_tcp({"127.0.0.1", port});
  const std::string url = fmt::format("tcp://127.0.0.1:{}", local_port(listener.get()));
  return std::make_unique<Server>(std::move(listener), url, std::move(options));
}

inline HostPort host_port_of(const Server& server) {
  return parse_host_port(server.address().substr(6));
}

// Runs `task` on the server's thread and waits for it; tests move the server's FakeClock this way.
inline void run_on(Server& server, const std::function<void()>& task) {
  std::promise<void> done;
  ASSERT_TRUE(server.loop().post([&] {
    task();
    done.set_value();
  }));
  ASSERT_EQ(done.get_future().wait_for(kLimit), std::future_status::ready);
}

// Collects the events of a watch.
class Events {
 public:
  Store::WatchCallback callback() {
    return [this](const WatchUpdate& update) {
      const MutexLock lock(mutex_);
      updates_.push_back(update);
      for (const StoreEvent& event : update.events)
        lines_.push_back(fmt::format("{} {}={}", event.type == StoreEvent::Type::kPut ? "put" : "del", event.kv.key,
                                     event.kv.value));
      changed_.notify_all();
    };
  }
  // All events as "put k=v" or "del k=", once there are `count` or the time is up.
  std::vector<std::string> wait(size_t count, std::chrono::seconds limit = kLimit) {
    const MutexLock lock(mutex_);
    changed_.wait_until(mutex_, Deadline::after(limit), [&]() REQUIRES(mutex_) { return lines_.size() >= count; });
    return lines_;
  }
  WatchUpdate::Type wait_end() {
    const MutexLock lock(mutex_);
    const auto ended = [&]() REQUIRES(mutex_) {
      return !updates_.empty() && updates_.back().type != WatchUpdate::Type::kEvents;
    };
    EXPECT_TRUE(changed_.wait_until(mutex_, Deadline::after(kLimit), ended));
    return updates_.empty() ? WatchUpdate::Type::kEvents : updates_.back().type;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::vector<WatchUpdate> updates_ GUARDED_BY(mutex_);
  std::vector<std::string> lines_ GUARDED_BY(mutex_);
};

// A peer that sends arbitrary bytes.
class RawPeer {
 public:
  explicit RawPeer(const Server& server) : RawPeer(host_port_of(server)) {}
  explicit RawPeer(const HostPort& server)
      : fd_(connect_tcp(server, Deadline::after(kLimit))),
        reader_(kMagic, {.payload_bytes = kMaxReplyBytes}),
        writer_(kMagic, kHelloVersion, size_t{1} << 30) {}

  void greet(uint64_t client = random_id()) {
    greet(StoreHello{.release = "test", .client = client, .incarnation = Incarnation::self()});
  }
  void greet(const StoreHello& hello) {
    EXPECT_EQ(prove(hello, kToken).type, raw(StoreMessage::kWelcome));
    writer_.set_version(kMaxVersion);
  }
  // The server's answer to a hello and a proof with `token`.
  Frame prove(const StoreHello& hello, const Token& token) {
    send(raw(StoreMessage::kHello), message_bytes(hello));
    const Challenge challenge = decode<Challenge>(receive().payload);
    send(raw(StoreMessage::kProof),
         message_bytes(ProofAnswer{token.prove(
             Side::kClient, {.version = challenge.version, .client = hello.nonce, .server = challenge.nonce})}));
    return receive();
  }
  void send(uint16_t type, std::vector<std::byte> payload) {
    writer_.push(type, payload);
    writer_.flush(fd_.get(), Deadline::after(kLimit));
  }
  void send_raw(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      bytes = bytes.subspan(send_some(fd_.get(), bytes));
      wait_ready(fd_.get(), POLLOUT, Deadline::after(kLimit));
    }
  }
  Frame receive() { return wait_frame(fd_.get(), reader_, Deadline::after(kLimit)); }
  // Whether the server closes the connection.
  bool closed() {
    return status_of([this] {
             while (true) receive();
           }).code() == ErrorCode::kPeerLost;
  }
  void end_sending() { ::shutdown(fd_.get(), SHUT_WR); }
  void close() { fd_.reset(); }

 private:
  UniqueFd fd_;
  FrameReader reader_;
  FrameWriter writer_;
};

}  // namespace tessera::store
