// For tests of links between agents: sessions that take callers, and a peer whose messages the test writes.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <concepts>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/fields.h"
#include "base/framing.h"
#include "base/message.h"
#include "base/metrics.h"
#include "base/mutex.h"
#include "base/socket.h"
#include "base/testing.h"
#include "peer/agent.h"
#include "peer/frame_check.h"
#include "peer/peer_watch.h"
#include "tessera/version.h"

namespace tessera {

// A process that does nothing until it is killed.
class IdleProcess {
 public:
  IdleProcess() {
    int told[2];
    EXPECT_EQ(::pipe(told), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      const std::vector<std::byte> out = message_bytes(Incarnation::self());
      (void)!::write(told[1], out.data(), out.size());
      while (true) ::pause();
    }
    std::array<std::byte, 512> bytes{};
    const ssize_t got = ::read(told[0], bytes.data(), bytes.size());
    const std::span<const std::byte> told_bytes(bytes.data(), static_cast<size_t>(got));
    incarnation_ = read_message<Incarnation>(told_bytes, "the child");
    ::close(told[0]);
    ::close(told[1]);
  }
  ~IdleProcess() { kill(); }
  void kill() {
    if (pid_ == 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  void stop() const {
    ::kill(pid_, SIGSTOP);
    ::waitpid(pid_, nullptr, WUNTRACED);
  }
  PeerWatch::Peer peer() const { return {.name = "trainer/0", .process = incarnation_, .worker = {}}; }
  const Incarnation& incarnation() const { return incarnation_; }

 private:
  pid_t pid_ = 0;
  Incarnation incarnation_;
};

inline Attach attach_to(const std::string& session) {
  return {.pair = "weights", .batch = "policy", .purpose = Attach::Purpose::kPull, .session = session};
}

inline Callee callee(const Agent& agent) {
  return {.address = agent.address(), .name = agent.identity().name(), .incarnation = agent.incarnation()};
}

// One end of a link. It records what has arrived over it, and why it has ended.
class LinkProbe {
 public:
  void adopt(std::shared_ptr<Link> link) {
    const MutexLock lock(mutex_);
    link_ = std::move(link);
    link_->set_handlers(
        [this](Frame& frame) {
          if (frame.type != kCode<Broken>) fail(ErrorCode::kMismatch, "unexpected message {}"_message, frame.type);
          const MutexLock locked(mutex_);
          frames_.push_back(frame.type);
          changed_.notify_all();
        },
        [this](const Status& status) {
          const MutexLock locked(mutex_);
          ends_.push_back(status.message());
          changed_.notify_all();
        },
        [this](const Detach&) {
          const MutexLock locked(mutex_);
          ends_.emplace_back("detached");
          changed_.notify_all();
        });
    changed_.notify_all();
  }
  // Waits until there is a link. Use it only on the loop's thread.
  std::shared_ptr<Link> link() {
    const MutexLock lock(mutex_);
    EXPECT_TRUE(changed_.wait_until(mutex_, soon(), [&]() REQUIRES(mutex_) { return link_ != nullptr; }));
    return link_;
  }
  std::string end() {
    const MutexLock lock(mutex_);
    EXPECT_TRUE(changed_.wait_until(mutex_, soon(), [&]() REQUIRES(mutex_) { return !ends_.empty(); }));
    return ends_.empty() ? "" : ends_.front();
  }
  size_t ends() {
    const MutexLock lock(mutex_);
    return ends_.size();
  }
  void wait_frames(size_t count) {
    const MutexLock lock(mutex_);
    EXPECT_TRUE(changed_.wait_until(mutex_, soon(), [&]() REQUIRES(mutex_) { return frames_.size() >= count; }));
  }
  size_t frames() {
    const MutexLock lock(mutex_);
    return frames_.size();
  }
  void release() {
    const MutexLock lock(mutex_);
    link_ = nullptr;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::shared_ptr<Link> link_ GUARDED_BY(mutex_);
  std::vector<uint16_t> frames_ GUARDED_BY(mutex_);
  std::vector<std::string> ends_ GUARDED_BY(mutex_);
};

// An agent, and the ends of its links, by session. A session is open once open() has been called.
class LinkedAgent final : public Acceptor {
 public:
  LinkedAgent(const std::string& job, Rank rank) : agent_({"default", job, rank, 2}, 1) {}
  ~LinkedAgent() override {
    agent_.run_on_loop([this] {
      for (const std::string& session : open_) agent_.close_session(session, this);
      const MutexLock lock(mutex_);
      for (auto& [session, end] : ends_) end.release();
    });
  }

  Agent& agent() { return agent_; }
  void open(const std::string& session) {
    (void)at(session);
    open_.push_back(session);
    agent_.run_on_loop([&] { agent_.open_session(session, this); });
  }
  void call(LinkedAgent& other, const std::string& session) {
    LinkProbe& end = at(session);
    agent_.call(callee(other.agent()), attach_to(session), soon(),
                [&](std::shared_ptr<Link> link) { end.adopt(std::move(link)); });
  }
  void accept(Caller caller) override { at(caller.attach.session).adopt(std::move(caller.link)); }
  LinkProbe& at(const std::string& session) {
    const MutexLock lock(mutex_);
    return ends_[session];
  }
  // Calls `call` with that session's link, on the loop.
  template <typename Call>
  void with(const std::string& session, Call call) {
    const std::shared_ptr<Link> link = at(session).link();
    agent_.run_on_loop([&, raw = link.get()] { call(*raw); });
  }
  void send(const std::string& session) {
    with(session, [](Link& link) { link.send(Broken{Status(ErrorCode::kPeerLost, "hello")}); });
  }
  void close(const std::string& session) {
    with(session, [](Link& link) { link.close(); });
  }

 private:
  Agent agent_;
  Mutex mutex_;
  std::map<std::string, LinkProbe> ends_ GUARDED_BY(mutex_);
  std::vector<std::string> open_;
};

inline int64_t connections() {
  return Metrics::process().connections.value();
}
// Waits until the process has `count` connections, counted at both ends.
inline void expect_connections(int64_t count) {
  for (const Deadline deadline = soon(); connections() != count && !deadline.passed();) ::usleep(100);
  EXPECT_EQ(connections(), count);
}

// A peer whose messages the test writes.
class RawPeer {
 public:
  explicit RawPeer(UniqueFd socket, uint16_t version = kProtocolMax)
      : socket_(std::move(socket)), writer_(kBusMagic, version, size_t{1} << 20) {
    reader_.take_checks();
  }

  template <typename Message>
  void say(uint32_t stream, const Message& message, std::vector<UniqueFd> fds = {}) {
    welcomed_ = welcomed_ || std::same_as<Message, Welcome>;
    say_bytes(stream, kCode<Message>, payload_of(message), std::move(fds));
  }
  void say_bytes(uint32_t stream, uint16_t type, std::span<const std::byte> payload, std::vector<UniqueFd> fds = {}) {
    const uint16_t check = welcomed_ ? check_.next(type, stream, payload) : uint16_t{0};
    writer_.push(type, payload, std::move(fds), stream, check);
    writer_.flush(socket_.get(), soon());
  }
  // As if the peer had sent the message and it had not arrived.
  template <typename Message>
  void lose(uint32_t stream, const Message& message) {
    (void)check_.next(kCode<Message>, stream, message_bytes(message));
  }
  // The next frame that is not a Ping. Answers the Pings before it.
  Frame frame() {
    for (;;) {
      Frame frame = wait_frame(socket_.get(), reader_, soon());
      welcomed_ = welcomed_ || frame.type == kCode<Welcome>;
      if (frame.type != kCode<Ping>) return frame;
      say(0, Pong{.number = parse<Ping>(frame.payload).number});
    }
  }
  template <typename Message>
  Message next(uint32_t stream) {
    const Frame frame = this->frame();
    EXPECT_EQ(frame.stream, stream);
    EXPECT_EQ(frame.type, kCode<Message>) << kNameOf<Message::kType>;
    return parse<Message>(frame.payload);
  }
  // Answers the next Ping, ignoring what comes before it. Returns its number.
  uint32_t ping() {
    for (;;) {
      const Frame frame = wait_frame(socket_.get(), reader_, soon());
      if (frame.type != kCode<Ping>) continue;
      const uint32_t number = parse<Ping>(frame.payload).number;
      say(0, Pong{.number = number});
      return number;
    }
  }
  bool closed() {
    try {
      (void)frame();
      return false;
    } catch (const Error& error) {
      return error.code() == ErrorCode::kPeerLost;
    }
  }

 private:
  static constexpr FrameLimits kLimits{.payload_bytes = kMaxMessageBytes, .fds = 4};

  UniqueFd socket_;
  FrameCheck check_;
  bool welcomed_ = false;
  FrameReader reader_{kBusMagic, kLimits, [](uint32_t) { return kLimits; }};
  FrameWriter writer_;
};

}  // namespace tessera
