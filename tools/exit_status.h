// What `tessera` tells the shell.
#pragma once

#include <string_view>

#include "tessera/error.h"

namespace tessera::tools {

enum class ExitStatus : int {
  kOk = 0,
  kVerificationFailed = 1,  // of a digest or against a checkpoint
  kBadInput = 2,            // arguments, files, disagreeing ranks, missing resources
  kDeadline = 3,
  kPeerLost = 4,       // died, or gave up
  kInterrupted = 130,  // SIGINT or SIGTERM reached this process, and it is not a service
};

// The status for a command that failed with `code`; `interrupted`: after a signal to this very process.
ExitStatus exit_status_of(ErrorCode code, bool interrupted);

// The status of a command that serves until a signal: what SIGTERM ends has done its work, as init systems understand
// it.
ExitStatus exit_status_of_service(int signal);

// "0 success; 1 ...": one line for --help.
std::string_view exit_status_help();

}  // namespace tessera::tools
