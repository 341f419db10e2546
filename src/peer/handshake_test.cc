#include "peer/handshake.h"

#include <gtest/gtest.h>

#include "peer/message_testing.h"

namespace tessera {
namespace {

TEST(Handshake, ComeBackAsTheyWereWrittenAndNothingElseDoes) {
  const Incarnation self = Incarnation::self();
  expect_exact(Welcome{1, "0.1.0", "trainer", 3, self});
  expect_exact(Reject{ErrorCode::kMismatch, "no"});
  expect_exact(Attach{"weights", "policy", Attach::Purpose::kReduce, "0123456789abcdef"});
  expect_exact(Detach{Status(ErrorCode::kPeerLost, "gone")});
  expect_exact(Broken{Status(ErrorCode::kPeerLost, "gone")});
}

// A later release's Hello has the range and the release in the same place. If it also speaks a version of this release,
// it only adds fields to the rest.
TEST(Handshake, AHelloOfALaterReleaseIsUnderstood) {
  const Hello hello{kProtocolMin, kProtocolMax + 3, "9.1.0", "default", "trainer", 3, Incarnation::self()};
  std::vector<std::byte> bytes = message_bytes(hello);
  for (size_t size = 0; size < bytes.size(); ++size)
    EXPECT_THROW(parse<Hello>(std::span(bytes).first(size)), Error) << "cut at " << size;
  EXPECT_EQ(message_bytes(parse<Hello>(bytes)), bytes);
  bytes.insert(bytes.end(), 8, std::byte{7});
  EXPECT_EQ(parse<Hello>(bytes).incarnation, hello.incarnation);

  ByteWriter out;
  out.put(uint16_t{kProtocolMax + 1});
  out.put(uint16_t{kProtocolMax + 2});
  out.put_string("9.1.0");
  out.put(uint64_t{0});  // a field that this release does not know
  const auto stranger = parse<Hello>(out.view());
  EXPECT_FALSE(stranger.speaks_ours());
  EXPECT_EQ(stranger.release, "9.1.0");
}

TEST(Handshake, ALongRejectIsCutToWhatAHelloMayTake) {
  const std::vector<std::byte> bytes = message_bytes(Reject{ErrorCode::kMismatch, std::string(100'000, 'x')});
  EXPECT_LE(bytes.size(), kMaxHelloBytes);
  EXPECT_EQ(parse<Reject>(bytes).text, std::string(2048, 'x'));
}

TEST(Handshake, ComeBackAsTheyAreDrawn) {
  expect_conversation_holds<HandshakeMessages>();
}

}  // namespace
}  // namespace tessera
