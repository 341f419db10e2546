#include "tools/exit_status.h"

#include <gtest/gtest.h>

namespace tessera::tools {
namespace {

TEST(ExitStatus, TellsTheShellWhatKindOfFailureItWas) {
  const std::pair<ErrorCode, int> cases[] = {
      {ErrorCode::kOk, 0},          {ErrorCode::kDataLoss, 1},          {ErrorCode::kInvalidArgument, 2},
      {ErrorCode::kMismatch, 2},    {ErrorCode::kNotFound, 2},          {ErrorCode::kAlreadyExists, 2},
      {ErrorCode::kUnavailable, 2}, {ErrorCode::kResourceExhausted, 2}, {ErrorCode::kDeadlineExceeded, 3},
      {ErrorCode::kPeerLost, 4},
  };
  for (const auto& [code, status] : cases) EXPECT_EQ(static_cast<int>(exit_status_of(code, false)), status);
}

TEST(ExitStatus, ACancellationIsOursAfterASignalAndThePeersOtherwise) {
  EXPECT_EQ(exit_status_of(ErrorCode::kCancelled, true), ExitStatus::kInterrupted);
  EXPECT_EQ(exit_status_of(ErrorCode::kCancelled, false), ExitStatus::kPeerLost);
}

TEST(ExitStatus, AfterASignalWhateverFailedWasInterrupted) {
  EXPECT_EQ(static_cast<int>(exit_status_of(ErrorCode::kPeerLost, true)), 130);
}

}  // namespace
}  // namespace tessera::tools
