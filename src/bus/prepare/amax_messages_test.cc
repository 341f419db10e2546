#include "bus/prepare/amax_messages.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "peer/message_testing.h"

namespace tessera::bus {
namespace {

TEST(AmaxMessages, ComeBackAsTheyWereWrittenAndNothingElseDoes) {
  expect_exact(Joins{{{0, 0, 3, 4}, {0, 1}, {7, 0}}});
  expect_exact(Amaxes{5, 2, Status(), {}, {0, 1.5f, 3e38f}});
  expect_exact(Agreed{5, 2, Status(ErrorCode::kPeerLost, "gone"), {}, {}});
  expect_exact(Agreed{5, 2, Status(), {1, 17, 2, std::numeric_limits<float>::infinity()}, {}});
}

TEST(AmaxMessages, KeysOfAmaxesAscend) {
  EXPECT_THROW(parse<Joins>(message_bytes(Joins{{{1, 0}, {0, 0}}})), Error);
  EXPECT_THROW(parse<Joins>(message_bytes(Joins{{{1, 0}, {1, 0}}})), Error);
  ByteWriter out;
  out.put_bytes(std::vector<std::byte>(17));
  EXPECT_THROW(parse<Joins>(out.view()), Error);
}

TEST(AmaxMessages, AmaxesAreFiniteAndNotNegative) {
  for (const float bad : {-1.0f, -0.0f, std::numeric_limits<float>::infinity(), std::nanf("")}) {
    EXPECT_THROW(parse<Amaxes>(message_bytes(Amaxes{5, 2, Status(), {}, {1, bad}})), Error) << bad;
    EXPECT_THROW(parse<Agreed>(message_bytes(Agreed{5, 2, Status(), {}, {bad}})), Error) << bad;
  }
  EXPECT_THROW(parse<Amaxes>(message_bytes(Amaxes{0, 2, Status(), {}, {}})), Error);
  EXPECT_THROW(parse<Amaxes>(message_bytes(Amaxes{5, 2, Status(), {1, 17, 2, 1.0f}, {}})), Error) << "finite";
  EXPECT_THROW(parse<Amaxes>(message_bytes(Amaxes{5, 2, Status(), {1, 17, -2, std::nanf("")}, {}})), Error);
  EXPECT_THROW(parse<Amaxes>(message_bytes(Amaxes{5, 2, Status(ErrorCode::kPeerLost, "gone"), {}, {1}})), Error);
}

TEST(AmaxMessages, ComeBackAsTheyAreDrawn) {
  expect_conversation_holds<bus::AmaxMessages>();
}

}  // namespace
}  // namespace tessera::bus
