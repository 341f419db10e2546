#include "bus/lending/messages.h"

#include <gtest/gtest.h>

#include "peer/message_testing.h"

namespace tessera::bus {
namespace {

TEST(LendingMessages, ComeBackAsTheyAreDrawn) {
  expect_conversation_holds<bus::LendingMessages>();
}

}  // namespace
}  // namespace tessera::bus
