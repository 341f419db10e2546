// Calls that may block, made so that a Python signal handler can end them: Ctrl-C, mostly.
#pragma once

#include <functional>
#include <memory>
#include <stop_token>

#include "base/fd.h"

namespace tessera::python {

// Makes `call` without the GIL, and throws what it throws. Python runs signal handlers only on the main thread, so
// there the call is made by a thread of its own ("tessera-call"): if a handler raises meanwhile, `interrupt` is called
// again and again until the call has ended, and what the handler raised is thrown. `interrupt` must make what the call
// waits for at that moment end soon, and not throw; `call` must not touch Python.
void call_interruptibly(const std::function<void()>& call, const std::function<void()>& interrupt);

// The same for a call that ends once a stop is requested.
void call_interruptibly(const std::function<void(std::stop_token)>& call);

}  // namespace tessera::python
