#include "peer/messages.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace tessera::bus {
namespace {

template <typename Message>
std::vector<std::byte> bytes_of_message(const Message& message) {
  ByteWriter out;
  message.write(out);
  return out.take();
}

// Every proper prefix and every message with a byte too many is refused.
template <typename Message>
void expect_exact(const Message& message) {
  std::vector<std::byte> bytes = bytes_of_message(message);
  EXPECT_EQ(bytes_of_message(parse<Message>(bytes)), bytes);
  for (size_t size = 0; size < bytes.size(); ++size)
    EXPECT_THROW(parse<Message>(std::span(bytes).first(size)), Error)
        << to_string(Message::kType) << " cut at " << size;
  bytes.push_back(std::byte{0});
  EXPECT_THROW(parse<Message>(bytes), Error);
}

TEST(Messages, ComeBackAsTheyWereWrittenAndNothingElseDoes) {
  const Incarnation self = Incarnation::self();
  expect_exact(Welcome{1, "0.1.0", "trainer", 3, self});
  expect_exact(Reject{ErrorCode::kMismatch, "no"});
  expect_exact(Attach{"weights", "policy", Attach::Purpose::kReduce, "0123456789abcdef"});
  expect_exact(Attached{3,
                        {{1, 4096}},
                        false,
                        {{{MemoryDesc::Kind::kShared, 1, 64, 128}, 8, {16, 4}, 4096},
                         {{MemoryDesc::Kind::kPrivate, 0, 4096, 4}, 0, {}, 0}}});
  expect_exact(Prepare{true, {0, 3, 7}});
  expect_exact(Take{.version = 5, .epoch = 2});
  expect_exact(Got{.version = 5, .epoch = 2, .reason = Status()});
  expect_exact(Decided{5, 2, Decided::Verdict::kCommit, Status()});
  expect_exact(Refuse{.version = 5, .epoch = 2, .reason = Status(ErrorCode::kDataLoss, "withdrawn")});
  expect_exact(Revoke{.version = 5, .epoch = 2, .reason = Status(ErrorCode::kPeerLost, "gone")});
  expect_exact(Digests{5, {{{1, 2}, 3}, {{4, 5}, 6}}});
  expect_exact(ProgressReport{5, 1000});
  expect_exact(Done{5, 10, Status(ErrorCode::kDataLoss, "digest")});
  expect_exact(Joins{{{0, 0, 3, 4}, {0, 1}, {7, 0}}});
  expect_exact(Amaxes{5, 2, Status(), {}, {0, 1.5f, 3e38f}});
  expect_exact(Agreed{5, 2, Status(ErrorCode::kPeerLost, "gone"), {}, {}});
  expect_exact(Agreed{5, 2, Status(), {1, 17, 2, std::numeric_limits<float>::infinity()}, {}});
  expect_exact(Detach{Status(ErrorCode::kPeerLost, "gone")});
  expect_exact(Broken{Status(ErrorCode::kPeerLost, "gone")});
}

// What later releases say first: the range and the release stay where they are, the rest of a version that is spoken
// here too is only added to.
TEST(Messages, AHelloOfALaterReleaseIsUnderstood) {
  const Hello hello{kProtocolMin, kProtocolMax + 3, "9.1.0", "default", "trainer", 3, Incarnation::self()};
  std::vector<std::byte> bytes = bytes_of_message(hello);
  for (size_t size = 0; size < bytes.size(); ++size)
    EXPECT_THROW(parse<Hello>(std::span(bytes).first(size)), Error) << "cut at " << size;
  EXPECT_EQ(bytes_of_message(parse<Hello>(bytes)), bytes);
  bytes.insert(bytes.end(), 8, std::byte{7});
  EXPECT_EQ(parse<Hello>(bytes).incarnation, hello.incarnation);

  ByteWriter out;
  out.put(uint16_t{kProtocolMax + 1});
  out.put(uint16_t{kProtocolMax + 2});
  out.put_string("9.1.0");
  out.put(uint64_t{0});  // whatever it says then
  const auto stranger = parse<Hello>(out.view());
  EXPECT_FALSE(stranger.speaks_ours());
  EXPECT_EQ(stranger.release, "9.1.0");
}

TEST(Messages, ALongRejectIsCutToWhatAHelloMayTake) {
  const std::vector<std::byte> bytes = bytes_of_message(Reject{ErrorCode::kMismatch, std::string(100'000, 'x')});
  EXPECT_LE(bytes.size(), kMaxHelloBytes);
  EXPECT_EQ(parse<Reject>(bytes).text, std::string(2048, 'x'));
}

TEST(Messages, DigestsAreWhole) {
  ByteWriter out;
  out.put(int64_t{1});
  out.put_bytes(std::vector<std::byte>(25));
  EXPECT_THROW(parse<Digests>(out.view()), Error);
}

TEST(Messages, DeltasOfAGrantAreWholeAndNotNegative) {
  const Grant grant{.version = 3, .epoch = 2, .stamp = 7, .deltas = {Grant::kInFull, 0, 4096}};
  const std::vector<std::byte> bytes = bytes_of_message(grant);
  EXPECT_EQ(parse<Grant>(bytes).deltas, grant.deltas);
  EXPECT_EQ(parse<Grant>(bytes).stamp, grant.stamp);
  for (size_t size = 0; size < bytes.size(); ++size)
    EXPECT_THROW(parse<Grant>(std::span(bytes).first(size)), Error) << "cut at " << size;
  EXPECT_THROW(parse<Grant>(bytes_of_message(Grant{.version = 3, .deltas = {-2}})), Error);
  EXPECT_EQ(parse<Take>(bytes_of_message(Take{.version = 3, .epoch = 2, .held = 9})).held, 9U);
  EXPECT_THROW(parse<Take>(bytes_of_message(Offer{.version = 3, .epoch = 2})), Error);
}

TEST(Messages, KeysOfAmaxesAscend) {
  EXPECT_THROW(parse<Joins>(bytes_of_message(Joins{{{1, 0}, {0, 0}}})), Error);
  EXPECT_THROW(parse<Joins>(bytes_of_message(Joins{{{1, 0}, {1, 0}}})), Error);
  ByteWriter out;
  out.put_bytes(std::vector<std::byte>(17));
  EXPECT_THROW(parse<Joins>(out.view()), Error);
}

TEST(Messages, AmaxesAreFiniteAndNotNegative) {
  for (const float bad : {-1.0f, -0.0f, std::numeric_limits<float>::infinity(), std::nanf("")}) {
    EXPECT_THROW(parse<Amaxes>(bytes_of_message(Amaxes{5, 2, Status(), {}, {1, bad}})), Error) << bad;
    EXPECT_THROW(parse<Agreed>(bytes_of_message(Agreed{5, 2, Status(), {}, {bad}})), Error) << bad;
  }
  EXPECT_THROW(parse<Amaxes>(bytes_of_message(Amaxes{0, 2, Status(), {}, {}})), Error);
  EXPECT_THROW(parse<Amaxes>(bytes_of_message(Amaxes{5, 2, Status(), {1, 17, 2, 1.0f}, {}})), Error) << "finite";
  EXPECT_THROW(parse<Amaxes>(bytes_of_message(Amaxes{5, 2, Status(), {1, 17, -2, std::nanf("")}, {}})), Error);
  EXPECT_THROW(parse<Amaxes>(bytes_of_message(Amaxes{5, 2, Status(ErrorCode::kPeerLost, "gone"), {}, {1}})), Error);
}

TEST(Messages, RandomBytesNeverDoMoreThanThrow) {
  std::mt19937_64 random(5);
  for (int i = 0; i < 20'000; ++i) {
    std::vector<std::byte> bytes(random() % 64);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() % 4 == 0 ? random() : 0);
    const auto attempt = [&](auto message) {
      try {
        parse<decltype(message)>(bytes);
      } catch (const Error&) {
      }
    };
    attempt(Hello{});
    attempt(Attached{});
    attempt(Prepare{});
    attempt(Digests{});
    attempt(Take{});
    attempt(Grant{});
    attempt(Done{});
    attempt(Revoke{});
    attempt(Broken{});
    attempt(Joins{});
    attempt(Amaxes{});
  }
}

TEST(Messages, SkippedRoutesMustAscend) {
  EXPECT_THROW(parse<Prepare>(bytes_of_message(Prepare{false, {3, 3}})), Error);
  EXPECT_THROW(parse<Prepare>(bytes_of_message(Prepare{false, {3, 1}})), Error);
}

}  // namespace
}  // namespace tessera::bus
