// Small helpers of the layers' tests.
#pragma once

#include <string>

#include "tessera/error.h"

namespace tessera {

// The message of the Error(kInvalidArgument) that `call` throws; says so where it throws none or another.
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

}  // namespace tessera
