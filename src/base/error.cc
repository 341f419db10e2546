#include <cstdlib>
#include <exception>
#include <new>

#include "base/fail.h"

namespace tessera {

std::string_view to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::kOk:
      return "ok";
    case ErrorCode::kInvalidArgument:
      return "invalid-argument";
    case ErrorCode::kMismatch:
      return "mismatch";
    case ErrorCode::kNotFound:
      return "not-found";
    case ErrorCode::kAlreadyExists:
      return "already-exists";
    case ErrorCode::kDeadlineExceeded:
      return "deadline-exceeded";
    case ErrorCode::kPeerLost:
      return "peer-lost";
    case ErrorCode::kCancelled:
      return "cancelled";
    case ErrorCode::kDataLoss:
      return "data-loss";
    case ErrorCode::kPermissionDenied:
      return "permission-denied";
    case ErrorCode::kResourceExhausted:
      return "resource-exhausted";
    case ErrorCode::kUnavailable:
      return "unavailable";
    case ErrorCode::kUnimplemented:
      return "unimplemented";
    case ErrorCode::kInternal:
      return "internal";
  }
  return "unknown";
}

ErrorCode code_of_errno(int error) {
  switch (error) {
    case ENOENT:
      return ErrorCode::kNotFound;
    case EEXIST:
      return ErrorCode::kAlreadyExists;
    case EACCES:
    case EPERM:
      return ErrorCode::kPermissionDenied;
    case ENOMEM:
    case ENOSPC:
    case EDQUOT:
    case EMFILE:
    case ENFILE:
      return ErrorCode::kResourceExhausted;
    case ETIMEDOUT:
      return ErrorCode::kDeadlineExceeded;
    case ESRCH:
    case EPIPE:
    case ECONNRESET:
      return ErrorCode::kPeerLost;
    case ECONNREFUSED:
      return ErrorCode::kUnavailable;
    case ENOSYS:
    case EOPNOTSUPP:
      return ErrorCode::kUnimplemented;
    default:
      return ErrorCode::kInvalidArgument;
  }
}

void fail_errno(std::string_view what, int error) {
  fail(code_of_errno(error), "{}: {}"_message, what, std::strerror(error));
}

Status status_of_current_exception() {
  try {
    throw;
  } catch (const Error& error) {
    return Status(error.code(), error.what());
  } catch (const std::bad_alloc&) {
    return Status(ErrorCode::kResourceExhausted, "out of memory"_message);
  } catch (const std::exception& error) {
    return Status(ErrorCode::kInternal, error.what());
  } catch (...) {
    return Status(ErrorCode::kInternal, "an exception of an unknown type");
  }
}

void check_failed(const char* file, int line, const char* condition, const std::string& values) {
  fmt::print(stderr, "{}:{}: broken invariant: {}{}{}\n", file, line, condition, values.empty() ? "" : ": ", values);
  std::abort();
}

}  // namespace tessera
