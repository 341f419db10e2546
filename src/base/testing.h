// Small helpers of the layers' tests.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>

#include "base/clock.h"
#include "tessera/error.h"

namespace tessera {

// For what takes no time: later is a hang, under sanitizers too.
inline Deadline soon() {
  return Deadline::after(seconds(60));
}

// What the Error that `call` throws says, behind its code where that is another than kInvalidArgument.
template <typename Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kInvalidArgument) return error.what();
    return std::string(to_string(error.code())) + ": " + error.what();
  }
  return "(no error)";
}

// Descriptors of this process.
inline size_t open_fds() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

}  // namespace tessera
