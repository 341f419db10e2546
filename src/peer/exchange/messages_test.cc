#include "peer/exchange/messages.h"

#include <gtest/gtest.h>

#include "peer/message_testing.h"

namespace tessera {
namespace {

TEST(ExchangeMessages, ComeBackAsTheyWereWrittenAndNothingElseDoes) {
  Attached attached{.slots = 3, .more_keys = false};
  attached.keys.push_back({.transport = "shm", .device = DeviceKind::kHost, .bytes = {std::byte{7}}, .fds = {}});
  attached.keys.back().fds.resize(2);
  attached.places = {{{1, 64, 128}, 8, {16, 4}, 4096}, {{0, 4096, 4}, 0, {}, 0}};
  expect_exact(attached);
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
