#include "base/thread.h"

#include <pthread.h>
#include <signal.h>

#include <system_error>

#include "base/clock.h"
#include "base/fail.h"

namespace tessera {

const Clock& Clock::steady() {
  class Steady final : public Clock {
    TimePoint now() const override { return std::chrono::steady_clock::now(); }
  };
  static const auto* const clock = new Steady;  // leaked on purpose: threads may outlive statics
  return *clock;
}

std::thread start_thread(const std::string& name, std::function<void()> body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // a new thread inherits the mask
  try {
    std::thread thread([name = name.substr(0, 15), body = std::move(body)] {
      pthread_setname_np(pthread_self(), name.c_str());
      body();
    });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return thread;
  } catch (const std::system_error& error) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    fail(ErrorCode::kResourceExhausted, "thread {} cannot be started: {}"_message, name, error.what());
  }
}

}  // namespace tessera
