// A function with a stack of its own, which runs on the thread that resumes it until it yields.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <functional>

namespace tessera::device {

// Sanitizers are told of every change of stack, and an exception may be in flight on each of them. Belongs to one
// thread.
class Fiber {
 public:
  static constexpr size_t kStackBytes = size_t{1} << 20;  // used pages count; a page below it faults

  // `body` must not throw. Throws Error(kResourceExhausted) if there is no memory for the stack.
  explicit Fiber(std::function<void()> body);
  // It must have ended, or never been resumed.
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Runs it until it yields or ends. Not from a fiber.
  void resume();
  // Inside of it: returns from resume(), and itself with the next one.
  void yield();
  bool ended() const { return ended_; }

 private:
  static void enter(unsigned high, unsigned low);
  void leave(bool for_good);

  // What the C++ runtime keeps about the exceptions of a thread, of the stack that does not run.
  struct Exceptions {
    void* caught = nullptr;
    unsigned uncaught = 0;
  };
  static void exchange(Exceptions& own, Exceptions& other);

  std::function<void()> body_;
  bool ended_ = false;
  std::byte* stack_ = nullptr;  // with the guard page
  ucontext_t context_{};
  ucontext_t resumer_{};
  Exceptions exceptions_;
  Exceptions resumer_exceptions_;
  // The sanitizers' own, of both stacks.
  void* fake_stack_ = nullptr;
  const void* resumer_stack_ = nullptr;
  size_t resumer_stack_bytes_ = 0;
  void* thread_state_ = nullptr;
  void* resumer_thread_state_ = nullptr;
};

}  // namespace tessera::device
