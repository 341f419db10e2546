#include "base/fields.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/fields_testing.h"

namespace tessera {
namespace {

using testing::HasSubstr;

enum class Paint : uint8_t { kRed, kGreen, kBlue };

struct Point {
  int32_t x = 0;
  int32_t y = 0;
  static void fields(auto& f, auto& self) {
    f("x", self.x);
    f("y", self.y);
    f.require(self.x >= self.y, "Point: x {} below y {}"_message, self.x, self.y);
  }
};

// Has its own write() and read().
struct Word {
  uint32_t value = 0;
  void write(ByteWriter& out) const { out.put(value); }
  static Word read(ByteReader& in) { return {.value = in.get<uint32_t>()}; }
};

struct Drawing {
  std::string name;
  Paint colour = Paint::kRed;
  bool closed = false;
  std::vector<Point> points;
  std::optional<Point> centre;
  std::vector<std::string> notes;
  std::vector<int64_t> widths;
  std::vector<uint16_t> few;
  Word word;
  Status status;
  uint64_t radius = 0;  // for a closed one
  static void fields(auto& f, auto& self) {
    f("name", self.name, 8);
    f("colour", self.colour, Paint::kBlue);
    f("closed", self.closed);
    f("points", self.points, 4);
    f("centre", self.centre);
    f("notes", self.notes, 2, 5);
    f.array("widths", self.widths, 3);
    short_list_field(f, "few", self.few,
                     [&](uint8_t count) { f.require(count <= 2, "Drawing: {} are not few"_message, count); });
    f("word", self.word);
    status_field(f, self.status, 16);
    if (self.closed) f("radius", self.radius);
  }
};

Drawing drawing() {
  return {.name = "fish",
          .colour = Paint::kGreen,
          .closed = true,
          .points = {{3, 1}, {4, 4}},
          .centre = Point{7, 5},
          .notes = {"a", "b"},
          .widths = {-1},
          .few = {9},
          .word = {.value = 6},
          .status = Status(ErrorCode::kPeerLost, "gone"),
          .radius = 8};
}

std::string error_of_bytes(std::span<const std::byte> bytes) {
  try {
    (void)read_message<Drawing>(bytes, "Drawing");
    return "no error";
  } catch (const Error& error) {
    return error.what();
  }
}

TEST(Fields, TravelInTheirOrder) {
  ByteWriter expected;
  expected.put_string("fish");
  expected.put(uint8_t{1});
  expected.put(true);
  expected.put(uint32_t{2});
  for (const int32_t number : {3, 1, 4, 4}) expected.put(number);
  expected.put(true);
  for (const int32_t number : {7, 5}) expected.put(number);
  expected.put(uint32_t{2});
  expected.put_string("a");
  expected.put_string("b");
  expected.put(uint32_t{8});
  expected.put(int64_t{-1});
  expected.put(uint8_t{1});
  expected.put(uint16_t{9});
  expected.put(uint32_t{6});
  expected.put(uint8_t{6});
  expected.put_string("gone");
  expected.put(uint64_t{8});
  EXPECT_EQ(message_bytes(drawing()), expected.take());
}

TEST(Fields, HoldForWhatIsDrawn) {
  expect_exact(drawing());
  expect_fields_hold<Drawing>();
}

TEST(Fields, ArePrinted) {
  EXPECT_EQ(message_text(drawing()),
            R"({name="fish" colour=1 closed=true points=[{x=3 y=1} {x=4 y=4}] centre={x=7 y=5} notes=["a" "b"] )"
            R"(widths=[-1] few=1 9 word=(4 bytes) code=6 text="gone" radius=8})");
}

TEST(Fields, AreCheckedAgainstTheirLimits) {
  const auto refused = [](auto change) {
    Drawing bad = drawing();
    change(bad);
    return error_of_bytes(message_bytes(bad));
  };
  EXPECT_THAT(refused([](Drawing& bad) { bad.name = "too long a name"; }), HasSubstr("a count of 15 where at most 8"));
  EXPECT_THAT(refused([](Drawing& bad) { bad.colour = static_cast<Paint>(3); }), HasSubstr("unknown code 3"));
  EXPECT_THAT(refused([](Drawing& bad) { bad.points.resize(5); }), HasSubstr("a count of 5 where at most 4"));
  EXPECT_THAT(refused([](Drawing& bad) { bad.notes[1] = "longer"; }), HasSubstr("a count of 6 where at most 5"));
  EXPECT_THAT(refused([](Drawing& bad) { bad.widths.resize(4); }), HasSubstr("a count of 32 where at most 24"));
  EXPECT_THAT(refused([](Drawing& bad) { bad.few.resize(3); }), HasSubstr("3 are not few"));
  EXPECT_THAT(refused([](Drawing& bad) { bad.centre = Point{1, 2}; }), HasSubstr("Point: x 1 below y 2"));
  Drawing wordy = drawing();
  wordy.status = Status(ErrorCode::kPeerLost, std::string(100, 'x'));
  EXPECT_EQ(read_message<Drawing>(message_bytes(wordy), "Drawing").status.message(), std::string(16, 'x'));
}

}  // namespace
}  // namespace tessera
