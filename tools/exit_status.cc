#include "tools/exit_status.h"

#include <csignal>

namespace tessera::tools {

ExitStatus exit_status_of(ErrorCode code, bool interrupted) {
  if (interrupted) return ExitStatus::kInterrupted;
  switch (code) {
    case ErrorCode::kOk:
      return ExitStatus::kOk;
    case ErrorCode::kDataLoss:
      return ExitStatus::kVerificationFailed;
    case ErrorCode::kDeadlineExceeded:
      return ExitStatus::kDeadline;
    case ErrorCode::kPeerLost:
    case ErrorCode::kCancelled:  // by the other side
      return ExitStatus::kPeerLost;
    case ErrorCode::kInvalidArgument:
    case ErrorCode::kMismatch:
    case ErrorCode::kNotFound:
    case ErrorCode::kAlreadyExists:
    case ErrorCode::kPermissionDenied:
    case ErrorCode::kResourceExhausted:
    case ErrorCode::kUnavailable:
    case ErrorCode::kUnimplemented:
    case ErrorCode::kInternal:
      return ExitStatus::kBadInput;
  }
  return ExitStatus::kBadInput;
}

ExitStatus exit_status_of_service(int signal) {
  return signal == SIGTERM ? ExitStatus::kOk : ExitStatus::kInterrupted;
}

std::string_view exit_status_help() {
  return "Exit status: 0 success, 1 verification or digest failed, 2 arguments or input, 3 deadline, 4 peer lost, "
         "130 interrupted (SIGTERM ends store and agent with 0).";
}

}  // namespace tessera::tools
