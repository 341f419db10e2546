#include "base/fork_guard.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/testing.h"

namespace tessera {
namespace {

TEST(ForkGuard, IsHereInItsOwnProcessOnly) {
  const ForkGuard guard;
  EXPECT_TRUE(guard.here());
  const pid_t child = ::fork();
  if (child == 0) {
    const bool refused = error_of([&] { guard.require("stream"); }).find("forked child") != std::string::npos;
    const ForkGuard own;  // made in the child
    ::_exit(!guard.here() && refused && own.here() ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(guard.here());
  guard.require("stream");
}

}  // namespace
}  // namespace tessera
