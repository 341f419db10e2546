#include "tools/interrupt.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <csignal>
#include <utility>

#include "base/clock.h"
#include "base/fail.h"
#include "base/thread.h"
#include "tools/exit_status.h"

namespace tessera::tools {
namespace {

constexpr Duration kGrace = std::chrono::seconds(3);

UniqueFd make_event() {
  UniqueFd fd(::eventfd(0, EFD_CLOEXEC));
  if (!fd) fail_errno("cannot create an eventfd");
  return fd;
}

void set_event(const UniqueFd& event) {
  const uint64_t one = 1;
  (void)!::write(event.get(), &one, sizeof(one));  // fails only if it is set already
}

void wait_for_event(const UniqueFd& event) {
  pollfd ready{event.get(), POLLIN, 0};
  while (::poll(&ready, 1, -1) < 0 && errno == EINTR) {
  }
}

[[noreturn]] void end_now() {
  constexpr std::string_view kLine = "tessera: interrupted\n";
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, kLine.data(), kLine.size());
  ::_exit(static_cast<int>(ExitStatus::kInterrupted));
}

}  // namespace

Interrupt::Interrupt() : came_(make_event()), ended_(make_event()) {
  sigset_t signals;
  ::sigemptyset(&signals);
  ::sigaddset(&signals, SIGINT);
  ::sigaddset(&signals, SIGTERM);
  if (const int error = ::pthread_sigmask(SIG_BLOCK, &signals, nullptr); error != 0)
    fail_errno("cannot block SIGINT and SIGTERM", error);
  signals_.reset(::signalfd(-1, &signals, SFD_CLOEXEC));
  if (!signals_) fail_errno("cannot create a signalfd");
  thread_ = start_thread("tsr-signals", [this] { serve(); });
}

Interrupt::~Interrupt() {
  set_event(ended_);
  thread_.join();
}

void Interrupt::check() const {
  if (requested()) fail(ErrorCode::kCancelled, "interrupted"_message);
}

int Interrupt::wait() const {
  wait_for_event(came_);
  return signal_;
}

// Signals stay in the signalfd: a second one makes the second poll return immediately.
void Interrupt::serve() {
  pollfd ready[] = {{ended_.get(), POLLIN, 0}, {signals_.get(), POLLIN, 0}};
  const auto wait = [&ready](int timeout_ms) {
    while (::poll(ready, 2, timeout_ms) < 0 && errno == EINTR) {
    }
    return ready[0].revents == 0;
  };
  if (!wait(-1)) return;

  signalfd_siginfo first{};
  [[maybe_unused]] const ssize_t taken = ::read(signals_.get(), &first, sizeof(first));
  signal_ = static_cast<int>(first.ssi_signo);
  stop_.request_stop();
  set_event(came_);
  if (wait(Deadline::after(kGrace).poll_ms())) end_now();
}

}  // namespace tessera::tools
