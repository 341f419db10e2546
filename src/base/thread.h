// Tessera's threads: named, with all signals blocked, joined by their owner.
#pragma once

#include <functional>
#include <string>
#include <thread>

namespace tessera {

// Starts `body` on a thread called `name` (the kernel keeps at most 15 characters). The thread blocks every signal, so
// that the host program's handlers run on the program's own threads. `body` must not throw. Join the result. Throws
// Error(kResourceExhausted) if the process may have no more threads.
std::thread start_thread(const std::string& name, std::function<void()> body);

}  // namespace tessera
