// Accepts connections on an event loop.
#pragma once

#include <functional>

#include "base/event_loop.h"
#include "base/fail.h"
#include "base/fd.h"

namespace tessera {

// Used on the loop's thread while the loop runs. Destroy it after the loop has stopped, or after stop().
class Listener {
 public:
  // Takes a connection. If it throws an Error, that connection is refused and closed.
  using OnSocket = std::function<void(UniqueFd)>;
  // A connection was refused, or none could be accepted, for example because no descriptors are left. Connections in
  // the backlog would wake the loop again and again, so accepting pauses for a while then, unless this callback calls
  // resume().
  using OnRefused = std::function<void(const Error& why)>;

  Listener(EventLoop& loop, UniqueFd socket) : loop_(loop), socket_(std::move(socket)) {}
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  void start(OnSocket on_socket, OnRefused on_refused);
  void pause();   // until resume(): connections wait in the backlog
  void resume();  // no effect after stop()
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
  EventLoop::TimerId timer_ = 0;  // resumes accepting
};

}  // namespace tessera
