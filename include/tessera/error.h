// Errors of Tessera: one code a kind, one exception type, and Status for threads that must not throw.
//
// Misuse and lost peers throw Error. A thread of Tessera never lets one escape: it keeps a Status in the operation that
// it works for, and waiting on the operation's Handle throws it. All types here are values and thread-compatible.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace tessera {

enum class ErrorCode {
  kOk = 0,
  kInvalidArgument,    // the caller's value is wrong: a shape, a layout, a name, an option
  kMismatch,           // two ranks, or two sides, that must agree disagree
  kNotFound,           // a file, tensor, key or batch does not exist
  kAlreadyExists,      // a key, file or rank exists already
  kDeadlineExceeded,   // a wait ended at its deadline
  kPeerLost,           // another process died or closed its end
  kCancelled,          // cancelled or interrupted by the user
  kDataLoss,           // a digest or a verification failed
  kPermissionDenied,   // another user's process, file or memory
  kResourceExhausted,  // memory, descriptors or disk space
  kUnavailable,        // the store cannot be reached now
  kUnimplemented,      // this build or machine lacks the feature
  kInternal,           // a broken invariant of Tessera
};

// "invalid-argument", "peer-lost", ...; stable, used in logs and JSON.
std::string_view to_string(ErrorCode code);

// Every failing call of the public API throws it. what() names values, rank, tensor and the way out.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

// The outcome of work done on another thread.
class [[nodiscard]] Status {
 public:
  Status() = default;  // success
  Status(ErrorCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == ErrorCode::kOk; }
  ErrorCode code() const { return code_; }
  const std::string& message() const { return message_; }
  // Throws Error unless ok().
  void throw_if_error() const {
    if (!ok()) throw Error(code_, message_);
  }
  bool operator==(const Status&) const = default;

 private:
  ErrorCode code_ = ErrorCode::kOk;
  std::string message_;
};

}  // namespace tessera
