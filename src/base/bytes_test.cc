#include "base/bytes.h"

#include <gtest/gtest.h>

#include <functional>

namespace tessera {
namespace {

enum class Colour : uint8_t { kRed, kBlue };

ErrorCode code_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode::kOk;
}

TEST(BytesTest, ReadsBackWhatWasWritten) {
  ByteWriter out;
  out.put<uint32_t>(7);
  out.put(-2.5);
  out.put_string("weights");
  out.put(Colour::kBlue);
  out.put<uint8_t>(1);

  ByteReader in(out.view(), "test");
  EXPECT_EQ(in.get<uint32_t>(), 7U);
  EXPECT_EQ(in.get<double>(), -2.5);
  EXPECT_EQ(in.get_string(16), "weights");
  EXPECT_EQ(in.get_enum(Colour::kBlue), Colour::kBlue);
  EXPECT_TRUE(in.get_bool());
  EXPECT_NO_THROW(in.finish());
}

TEST(BytesTest, EveryTruncationIsAnError) {
  ByteWriter out;
  out.put<uint64_t>(1);
  out.put_string("a name");
  for (size_t length = 0; length < out.size(); ++length) {
    ByteReader in(out.view().first(length), "cut");
    EXPECT_EQ(code_of([&] {
                in.get<uint64_t>();
                in.get_string(100);
              }),
              ErrorCode::kInvalidArgument)
        << length;
  }
}

TEST(BytesTest, RefusesWhatIsOutOfRange) {
  ByteWriter long_text;
  long_text.put_string("12345");
  EXPECT_EQ(code_of([&] { ByteReader(long_text.view(), "x").get_string(4); }), ErrorCode::kInvalidArgument);

  ByteWriter two;
  two.put<uint8_t>(2);
  EXPECT_EQ(code_of([&] { ByteReader(two.view(), "x").get_bool(); }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of([&] { ByteReader(two.view(), "x").get_enum(Colour::kBlue); }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of([&] { ByteReader(two.view(), "x").finish(); }), ErrorCode::kInvalidArgument);
}

TEST(BytesTest, ACountMustFitWhatIsLeftBeforeAnythingIsAllocated) {
  ByteWriter out;
  out.put<uint32_t>(0xffffffff);
  EXPECT_EQ(code_of([&] { ByteReader(out.view(), "x").get_count(0xffffffff, 8); }), ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace tessera
