#include "bus/session/versions.h"

#include <gtest/gtest.h>

#include "peer/message_testing.h"

namespace tessera::bus {
namespace {

TEST(Versions, ComeBackAsTheyWereWrittenAndNothingElseDoes) {
  expect_exact(Take{.version = 5, .epoch = 2});
  expect_exact(Got{.version = 5, .epoch = 2, .reason = Status()});
  expect_exact(Decided{5, 2, Decided::Verdict::kCommit, Status()});
  expect_exact(Refuse{.version = 5, .epoch = 2, .reason = Status(ErrorCode::kDataLoss, "withdrawn")});
  expect_exact(Revoke{.version = 5, .epoch = 2, .reason = Status(ErrorCode::kPeerLost, "gone")});
  expect_exact(Digests{5, {{{1, 2}, 3}, {{4, 5}, 6}}});
  expect_exact(ProgressReport{5, 1000});
  expect_exact(Done{5, 10, Status(ErrorCode::kDataLoss, "digest")});
}

TEST(Versions, DigestsAreWhole) {
  ByteWriter out;
  out.put(int64_t{1});
  out.put_bytes(std::vector<std::byte>(25));
  EXPECT_THROW(parse<Digests>(out.view()), Error);
}

TEST(Versions, DeltasOfAGrantAreWholeAndNotNegative) {
  const Grant grant{.version = 3, .epoch = 2, .stamp = 7, .deltas = {Grant::kInFull, 0, 4096}};
  const std::vector<std::byte> bytes = message_bytes(grant);
  EXPECT_EQ(parse<Grant>(bytes).deltas, grant.deltas);
  EXPECT_EQ(parse<Grant>(bytes).stamp, grant.stamp);
  for (size_t size = 0; size < bytes.size(); ++size)
    EXPECT_THROW(parse<Grant>(std::span(bytes).first(size)), Error) << "cut at " << size;
  EXPECT_THROW(parse<Grant>(message_bytes(Grant{.version = 3, .deltas = {-2}})), Error);
  EXPECT_EQ(parse<Take>(message_bytes(Take{.version = 3, .epoch = 2, .held = 9})).held, 9U);
  EXPECT_TRUE(parse<Take>(message_bytes(Take{.version = 3, .epoch = 2, .lease = true})).lease);
  EXPECT_THROW(parse<Take>(message_bytes(Offer{.version = 3, .slot = 2})), Error);
}

TEST(Versions, BeyondTheLargestAreMalformed) {
  EXPECT_EQ(parse<Offer>(message_bytes(Offer{.version = kMaxVersion})).version, kMaxVersion);
  EXPECT_THROW(parse<Offer>(message_bytes(Offer{.version = kMaxVersion + 1})), Error);
  EXPECT_THROW(parse<Chosen>(message_bytes(Chosen{.version = kMaxVersion + 1})), Error);
  EXPECT_THROW(parse<Take>(message_bytes(Take{.version = kMaxVersion + 1})), Error);
  EXPECT_THROW(parse<Newest>(message_bytes(Newest{.version = kMaxVersion + 1})), Error);
  EXPECT_THROW(parse<Ahead>(message_bytes(Ahead{.version = kMaxVersion + 1})), Error);
  EXPECT_THROW(parse<Ahead>(message_bytes(Ahead{.version = 0})), Error);
}

TEST(Versions, ComeBackAsTheyAreDrawn) {
  expect_conversation_holds<VersionMessages>();
}

}  // namespace
}  // namespace tessera::bus
