#include "base/listener.h"

#include <sys/epoll.h>

#include "base/socket.h"

namespace tessera {
namespace {

constexpr Duration kPause = seconds(0.2);
constexpr int kAcceptedAtOnce = 16;  // then other events of the loop get their turn

}  // namespace

void Listener::start(OnSocket on_socket, OnRefused on_refused) {
  on_socket_ = std::move(on_socket);
  on_refused_ = std::move(on_refused);
  resume();
}

void Listener::resume() {
  if (stopped_ || listening_) return;
  loop_.cancel_timer(std::exchange(timer_, 0));
  loop_.add_fd(socket_.get(), EPOLLIN, [this](uint32_t) { accept(); });
  listening_ = true;
}

void Listener::pause() {
  if (std::exchange(listening_, false)) loop_.remove_fd(socket_.get());
}

void Listener::stop() {
  stopped_ = true;
  pause();
  loop_.cancel_timer(std::exchange(timer_, 0));
}

void Listener::accept() {
  for (int accepted = 0; accepted < kAcceptedAtOnce && listening_; ++accepted) {
    UniqueFd socket;
    try {
      socket = accept_connection(socket_.get());
    } catch (const Error& error) {
      pause();
      timer_ = loop_.add_timer_after(kPause, [this] { resume(); });
      return on_refused_(error);
    }
    if (!socket) return;
    try {
      on_socket_(std::move(socket));
    } catch (const Error& error) {
      on_refused_(error);
    }
  }
}

}  // namespace tessera
