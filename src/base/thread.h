// Threads of Tessera: named, all signals blocked, joined by their owner.
#pragma once

#include <functional>
#include <string>
#include <thread>

namespace tessera {

// Starts `body` on a thread called `name` (at most 15 characters reach the kernel). The thread blocks every signal, so
// that the host program's handlers run on its own threads. `body` must not throw. Join the result. Throws
// Error(kResourceExhausted) where the process may have no more threads.
std::thread start_thread(const std::string& name, std::function<void()> body);

}  // namespace tessera
