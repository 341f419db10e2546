#include "base/message.h"

#include <gtest/gtest.h>

#include <type_traits>

#include "base/fail.h"

namespace tessera {
namespace {

// A function that takes a MessageFormat accepts no unmarked text and no arguments that do not fit its fields.
template <typename Text, typename... Args>
concept Formats = requires(const Args&... args) { failed(ErrorCode::kMismatch, Text{}, args...); };
static_assert(!Formats<const char*>);
static_assert(!Formats<std::string>);
static_assert(!std::is_convertible_v<const char*, MessageText>);
static_assert(!std::is_convertible_v<const char*, MessageFormat<>>);

TEST(Message, IsFormattedAsItStands) {
  const Status status = failed(ErrorCode::kMismatch, "rank {} of {}"_message, 3, 4);
  EXPECT_EQ(status.code(), ErrorCode::kMismatch);
  EXPECT_EQ(status.message(), "rank 3 of 4");
  EXPECT_EQ(fmt::format("{}: {}"_message, "a", 1), "a: 1");
  EXPECT_EQ(std::string("plain"_message), "plain");
}

TEST(Message, OfWhatCannotHappenNeedsNoMark) {
  EXPECT_THROW(fail_internal("{} is odd", 2), Error);
  EXPECT_EQ(failed_internal("{} is odd", 2).code(), ErrorCode::kInternal);
}

}  // namespace
}  // namespace tessera
