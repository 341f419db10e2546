// The exit statuses of `tessera`.
#pragma once

#include <string_view>

#include "tessera/error.h"

namespace tessera::tools {

enum class ExitStatus : int {
  kOk = 0,
  kVerificationFailed = 1,  // of a digest or of a checkpoint
  kBadInput = 2,            // arguments, files, disagreeing ranks, missing resources
  kDeadline = 3,
  kPeerLost = 4,       // died, or gave up
  kInterrupted = 130,  // SIGINT or SIGTERM ended this process, and it is not a service
};

// The status of a command that failed with `code`; `interrupted`: after a signal to this process.
ExitStatus exit_status_of(ErrorCode code, bool interrupted);

// The status of a command that serves until a signal: after SIGTERM its work is done, as init systems expect.
ExitStatus exit_status_of_service(int signal);

// "0 success; 1 ...": one line for --help.
std::string_view exit_status_help();

}  // namespace tessera::tools
