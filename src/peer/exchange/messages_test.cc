#include "peer/exchange/messages.h"

#include <gtest/gtest.h>

#include "peer/message_testing.h"

namespace tessera {
namespace {

TEST(ExchangeMessages, ComeBackAsTheyWereWrittenAndNothingElseDoes) {
  expect_exact(Attached{3,
                        {{1, 4096}},
                        false,
                        {{{MemoryDesc::Kind::kShared, 1, 64, 128}, 8, {16, 4}, 4096},
                         {{MemoryDesc::Kind::kPrivate, 0, 4096, 4}, 0, {}, 0}}});
  expect_exact(Prepare{true, {0, 3, 7}});
}

TEST(ExchangeMessages, SkippedRoutesMustAscend) {
  EXPECT_THROW(parse<Prepare>(message_bytes(Prepare{false, {3, 3}})), Error);
  EXPECT_THROW(parse<Prepare>(message_bytes(Prepare{false, {3, 1}})), Error);
}

TEST(ExchangeMessages, ComeBackAsTheyAreDrawn) {
  expect_conversation_holds<tessera::ExchangeMessages>();
}

}  // namespace
}  // namespace tessera
