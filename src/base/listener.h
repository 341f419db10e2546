// Accepts connections on an event loop.
#pragma once

#include <functional>

#include "base/event_loop.h"
#include "base/fail.h"
#include "base/fd.h"

namespace tessera {

// Used on the loop's thread once the loop runs; destroyed when that has stopped, or after stop().
class Listener {
 public:
  // Takes a connection. An Error out of it refuses, and closes, that one.
  using OnSocket = std::function<void(UniqueFd)>;
  // A connection was refused, or none could be accepted: descriptors have run out, say. What waits in the backlog would
  // wake the loop without end, so nothing is accepted for a while then, unless this calls resume().
  using OnRefused = std::function<void(const Error& why)>;

  Listener(EventLoop& loop, UniqueFd socket) : loop_(loop), socket_(std::move(socket)) {}
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  void start(OnSocket on_socket, OnRefused on_refused);
  void pause();   // until resume(): callers wait in the backlog
  void resume();  // does nothing once stopped
  void stop();    // for good
  const UniqueFd& socket() const { return socket_; }

 private:
  void accept();

  EventLoop& loop_;
  const UniqueFd socket_;
  OnSocket on_socket_;
  OnRefused on_refused_;
  bool listening_ = false;
  bool stopped_ = false;
  EventLoop::TimerId timer_ = 0;  // after which it resumes
};

}  // namespace tessera
