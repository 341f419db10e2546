#include "device/virtual/fiber.h"

#include <cxxabi.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <utility>

#include "base/fail.h"

#if defined(__SANITIZE_ADDRESS__)
#define TESSERA_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TESSERA_ASAN 1
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define TESSERA_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define TESSERA_TSAN 1
#endif
#endif

#ifdef TESSERA_ASAN
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef TESSERA_TSAN
#include <sanitizer/tsan_interface.h>
#endif

namespace tessera::device {
namespace {

// <sanitizer/common_interface_defs.h> explains the pairs: start before the stack changes, finish on the new one.
#ifdef TESSERA_ASAN
void start_switch(void** fake_stack, const void* to, size_t bytes) {
  __sanitizer_start_switch_fiber(fake_stack, to, bytes);
}
void finish_switch(void* fake_stack, const void** from, size_t* bytes) {
  __sanitizer_finish_switch_fiber(fake_stack, from, bytes);
}
#else
void start_switch(void**, const void*, size_t) {}
void finish_switch(void*, const void**, size_t*) {}
#endif

#ifdef TESSERA_TSAN
void* thread_state() {
  return __tsan_get_current_fiber();
}
void* new_thread_state() {
  return __tsan_create_fiber(0);
}
void drop_thread_state(void* state) {
  __tsan_destroy_fiber(state);
}
void use_thread_state(void* state) {
  __tsan_switch_to_fiber(state, 0);
}
#else
void* thread_state() {
  return nullptr;
}
void* new_thread_state() {
  return nullptr;
}
void drop_thread_state(void*) {}
void use_thread_state(void*) {}
#endif

size_t page_bytes() {
  return static_cast<size_t>(::sysconf(_SC_PAGESIZE));
}

}  // namespace

Fiber::Fiber(std::function<void()> body) : body_(std::move(body)) {
  void* const stack = ::mmap(nullptr, kStackBytes + page_bytes(), PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (stack == MAP_FAILED) fail_errno("mmap of a fiber's stack");
  stack_ = static_cast<std::byte*>(stack);
  ::mprotect(stack_, page_bytes(), PROT_NONE);
  ::getcontext(&context_);
  context_.uc_stack.ss_sp = stack_ + page_bytes();
  context_.uc_stack.ss_size = kStackBytes;
  context_.uc_link = nullptr;
  const auto self = reinterpret_cast<uintptr_t>(this);
  ::makecontext(&context_, reinterpret_cast<void (*)()>(&Fiber::enter), 2, static_cast<unsigned>(self >> 32),
                static_cast<unsigned>(self));
  thread_state_ = new_thread_state();
}

Fiber::~Fiber() {
  drop_thread_state(thread_state_);
  ::munmap(stack_, kStackBytes + page_bytes());
}

void Fiber::enter(unsigned high, unsigned low) {
  auto* const self = reinterpret_cast<Fiber*>((static_cast<uintptr_t>(high) << 32) | low);
  finish_switch(nullptr, &self->resumer_stack_, &self->resumer_stack_bytes_);
  self->body_();
  self->body_ = nullptr;
  self->ended_ = true;
  self->leave(true);
}

// __cxa_get_globals() is per thread; its two members are those of the Itanium C++ ABI.
void Fiber::exchange(Exceptions& own, Exceptions& other) {
  auto* const globals = reinterpret_cast<char*>(abi::__cxa_get_globals());
  std::memcpy(static_cast<void*>(&own.caught), globals, sizeof own.caught);
  std::memcpy(&own.uncaught, globals + sizeof own.caught, sizeof own.uncaught);
  std::memcpy(globals, static_cast<const void*>(&other.caught), sizeof other.caught);
  std::memcpy(globals + sizeof other.caught, &other.uncaught, sizeof other.uncaught);
}

void Fiber::resume() {
  void* fake_stack = nullptr;
  exchange(resumer_exceptions_, exceptions_);
  resumer_thread_state_ = thread_state();
  start_switch(&fake_stack, stack_ + page_bytes(), kStackBytes);
  use_thread_state(thread_state_);
  ::swapcontext(&resumer_, &context_);
  finish_switch(fake_stack, nullptr, nullptr);
}

void Fiber::yield() {
  leave(false);
  finish_switch(fake_stack_, &resumer_stack_, &resumer_stack_bytes_);
}

void Fiber::leave(bool for_good) {
  exchange(exceptions_, resumer_exceptions_);
  start_switch(for_good ? nullptr : &fake_stack_, resumer_stack_, resumer_stack_bytes_);
  use_thread_state(resumer_thread_state_);
  ::swapcontext(&context_, &resumer_);
}

}  // namespace tessera::device
