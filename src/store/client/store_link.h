// Maintains a client's connection: connects, says hello and, after a loss, tries again at growing intervals.
//
// Thread-compatible; lives on one EventLoop. Its owner receives the frames.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/event_loop.h"
#include "base/framing.h"
#include "store/client/connector.h"
#include "store/protocol.h"

namespace tessera::store {

class StoreLink {
 public:
  struct Callbacks {
    std::function<StoreHello()> hello;                        // called for each connection
    std::function<void(const StoreWelcome&)> on_ready;        // the hello was answered: send() works
    std::function<void(StoreMessage, ByteReader&)> on_frame;  // if it throws, the connection is closed
    std::function<void(const Status&)> on_down;               // called for each failed attempt and each loss
  };

  StoreLink(EventLoop& loop, std::unique_ptr<Connector> connector, Callbacks callbacks)
      : loop_(loop), connector_(std::move(connector)), callbacks_(std::move(callbacks)) {}
  ~StoreLink();
  StoreLink(const StoreLink&) = delete;
  StoreLink& operator=(const StoreLink&) = delete;

  void connect();
  bool ready() const { return stage_ == Stage::kReady; }
  // REQUIRES: ready(). Sends in the loop's next round.
  void send(StoreMessage type, std::span<const std::byte> payload);

 private:
  enum class Stage { kDown, kConnecting, kGreeting, kReady };

  void on_events(uint32_t events);
  void greet();
  void on_greeting(const Frame& frame);
  void on_challenge(const Frame& frame);
  void take(const Frame& frame);
  void on_welcome(const Frame& frame);
  void flush();
  void down(const Status& why);

  EventLoop& loop_;
  std::unique_ptr<Connector> connector_;
  const Callbacks callbacks_;
  Stage stage_ = Stage::kDown;
  UniqueFd fd_;
  Handshake handshake_;
  std::optional<Token> token_;  // until it is proved
  std::optional<FrameReader> reader_;
  std::optional<FrameWriter> writer_;
  Duration pause_{};
  EventLoop::TimerId retry_timer_ = 0;
  EventLoop::TimerId greeting_timer_ = 0;
  EventLoop::TimerId flush_timer_ = 0;
};

}  // namespace tessera::store
