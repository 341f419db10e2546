#include "waiting.h"

#include <nanobind/nanobind.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <exception>
#include <thread>

#include "base/fail.h"
#include "base/thread.h"

namespace tessera::python {
namespace {

namespace nb = nanobind;

// Whether this is Python's main thread (never true if a program embeds Python on another thread: then signals wait for
// the call).
bool on_main_thread() {
  return ::gettid() == ::getpid();
}

// A signal may arrive on another thread than the polling one, and its handler cannot wake that: so it polls
// periodically.
constexpr int kLookMilliseconds = 1000;
constexpr int kInterruptMilliseconds = 100;  // pause before a call that has not ended is interrupted again

}  // namespace

void call_interruptibly(const std::function<void()>& call, const std::function<void()>& interrupt) {
  if (!on_main_thread()) {
    const nb::gil_scoped_release released;
    return call();
  }
  const UniqueFd ended(::eventfd(0, EFD_CLOEXEC));
  if (!ended) fail(ErrorCode::kResourceExhausted, "no descriptor is left to wait with (raise `ulimit -n`)"_message);
  std::exception_ptr failure;
  std::thread thread = start_thread("tessera-call", [&] {
    try {
      call();
    } catch (...) {
      failure = std::current_exception();
    }
    ::eventfd_write(ended.get(), 1);
  });
  const auto ends_within = [&](int milliseconds) {
    pollfd event{.fd = ended.get(), .events = POLLIN, .revents = 0};
    return ::poll(&event, 1, milliseconds) > 0;
  };
  bool raised = false;
  for (bool over = false; !over;) {
    {
      const nb::gil_scoped_release released;
      over = ends_within(kLookMilliseconds);
    }
    if (over || PyErr_CheckSignals() == 0) continue;
    raised = over = true;
  }
  if (!raised) {
    const nb::gil_scoped_release released;
    thread.join();
  } else {
    const nb::error_scope kept;  // the handler's exception
    const nb::gil_scoped_release released;
    do {
      interrupt();  // the call may not have begun to wait yet, or may wait again
    } while (!ends_within(kInterruptMilliseconds));
    thread.join();
  }
  if (raised) throw nb::python_error();
  if (failure) std::rethrow_exception(failure);
}

void call_interruptibly(const std::function<void(std::stop_token)>& call) {
  std::stop_source stop;
  call_interruptibly([&] { call(stop.get_token()); }, [&] { stop.request_stop(); });
}

}  // namespace tessera::python
