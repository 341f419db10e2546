// Makes blocking calls so that a Python signal handler can end them; mostly for Ctrl-C.
#pragma once

#include <functional>
#include <memory>
#include <stop_token>

#include "base/fd.h"

namespace tessera::python {

// Makes `call` without the GIL, and rethrows its exceptions. Python runs signal handlers only on the main thread, so
// there a separate thread ("tessera-call") makes the call: if a handler raises in the meantime, `interrupt` is called
// again and again until the call has ended, and the handler's exception is thrown. `interrupt` must soon end what the
// call waits for at that moment, and must not throw; `call` must not touch Python.
void call_interruptibly(const std::function<void()>& call, const std::function<void()>& interrupt);

// The same for a call that ends once a stop is requested.
void call_interruptibly(const std::function<void(std::stop_token)>& call);

}  // namespace tessera::python
