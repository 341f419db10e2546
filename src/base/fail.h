// Throwing errors with formatted messages, and invariant checks that print both values.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cerrno>
#include <cstring>
#include <string_view>
#include <type_traits>
#include <utility>

#include "base/message.h"
#include "tessera/error.h"

namespace tessera {

template <typename... Args>
[[noreturn]] void fail(ErrorCode code, std::type_identity_t<MessageFormat<Args...>> message, Args&&... args) {
  throw Error(code, fmt::format(message.format, std::forward<Args>(args)...));
}

template <typename... Args>
Status failed(ErrorCode code, std::type_identity_t<MessageFormat<Args...>> message, Args&&... args) {
  return Status(code, fmt::format(message.format, std::forward<Args>(args)...));
}

// For what cannot happen unless this project has a bug: throws kInternal, with a text that has no entry in the
// documentation.
template <typename... Args>
[[noreturn]] void fail_internal(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(ErrorCode::kInternal, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
Status failed_internal(fmt::format_string<Args...> format, Args&&... args) {
  return Status(ErrorCode::kInternal, fmt::format(format, std::forward<Args>(args)...));
}

// The error code for a failed system call that set errno to `error`.
ErrorCode code_of_errno(int error);

// Throws "<what>: <strerror>", with the code that `error` (errno by default) stands for.
[[noreturn]] void fail_errno(std::string_view what, int error = errno);

// The Status of an exception in flight: call it inside a catch block.
Status status_of_current_exception();

[[noreturn]] void check_failed(const char* file, int line, const char* condition, const std::string& values);

}  // namespace tessera

#define TESSERA_CHECK(condition)                                                   \
  do {                                                                             \
    if (!(condition)) ::tessera::check_failed(__FILE__, __LINE__, #condition, {}); \
  } while (false)

#define TESSERA_CHECK_OP_(a, op, b)                                                                                \
  do {                                                                                                             \
    const auto& check_a_ = (a);                                                                                    \
    const auto& check_b_ = (b);                                                                                    \
    if (!(check_a_ op check_b_))                                                                                   \
      ::tessera::check_failed(__FILE__, __LINE__, #a " " #op " " #b, fmt::format("{} vs {}", check_a_, check_b_)); \
  } while (false)
#define TESSERA_CHECK_EQ(a, b) TESSERA_CHECK_OP_(a, ==, b)
#define TESSERA_CHECK_LE(a, b) TESSERA_CHECK_OP_(a, <=, b)
#define TESSERA_CHECK_LT(a, b) TESSERA_CHECK_OP_(a, <, b)
