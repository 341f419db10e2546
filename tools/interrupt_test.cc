#include "tools/interrupt.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <future>

#include "base/fail.h"

namespace tessera::tools {
namespace {

// The exit status of a child that runs `body` with its own Interrupt.
template <typename Body>
int status_of_child(Body body) {
  const pid_t child = ::fork();
  if (child == 0) {
    int status = 99;
    {
      Interrupt interrupt;
      status = body(interrupt);
    }
    ::_exit(status);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(Interrupt, WithoutASignalNothingHappens) {
  EXPECT_EQ(status_of_child([](Interrupt& interrupt) {
              interrupt.check();
              return interrupt.requested() ? 1 : 0;
            }),
            0);
}

TEST(Interrupt, ASignalEndsAWaitAndThenEveryCheck) {
  for (const int signal : {SIGINT, SIGTERM})
    EXPECT_EQ(status_of_child([signal](Interrupt& interrupt) {
                ::kill(::getpid(), signal);
                if (interrupt.wait() != signal) return 3;
                try {
                  interrupt.check();
                } catch (const Error& error) {
                  return error.code() == ErrorCode::kCancelled ? 0 : 1;
                }
                return 2;
              }),
              0);
}

TEST(Interrupt, ASignalCancelsWhatIsUnderWay) {
  EXPECT_EQ(status_of_child([](Interrupt& interrupt) {
              std::promise<void> cancelled;
              const Interrupt::Scope scope(interrupt, [&] { cancelled.set_value(); });
              ::kill(::getpid(), SIGINT);
              cancelled.get_future().wait();
              return 0;
            }),
            0);
}

TEST(Interrupt, WhatBeginsAfterTheSignalIsCancelledAtOnce) {
  EXPECT_EQ(status_of_child([](Interrupt& interrupt) {
              ::kill(::getpid(), SIGINT);
              interrupt.wait();
              bool cancelled = false;
              const Interrupt::Scope scope(interrupt, [&] { cancelled = true; });
              return cancelled ? 0 : 1;
            }),
            0);
}

TEST(Interrupt, ASecondSignalEndsAWaitThatCannotBeCancelled) {
  EXPECT_EQ(status_of_child([](Interrupt& interrupt) {
              ::kill(::getpid(), SIGINT);
              interrupt.wait();
              ::kill(::getpid(), SIGINT);
              std::promise<void>().get_future().wait();  // never fulfilled
              return 1;
            }),
            130);
}

}  // namespace
}  // namespace tessera::tools
