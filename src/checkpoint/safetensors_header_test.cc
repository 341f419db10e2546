#include "checkpoint/safetensors_header.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "base/escape.h"
#include "base/fail.h"

namespace tessera::checkpoint {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Pair;

std::string error_of(std::string_view json, int64_t data_bytes) {
  try {
    parse_header(json, data_bytes, "m.safetensors");
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
    return error.what();
  }
  return "accepted";
}

std::string tensor(const std::string& name, const std::string& dtype, const std::string& shape,
                   const std::string& offsets) {
  return fmt::format(R"("{}":{{"dtype":"{}","shape":{},"data_offsets":{}}})", name, dtype, shape, offsets);
}

TEST(SafetensorsHeader, ReadsTensorsInTheOrderOfTheirBytes) {
  const std::string json = "{" + tensor("late", "BF16", "[2,3]", "[8,20]") +
                           R"(,"__metadata__":{"format":"pt","":""},)" + tensor("early", "I64", "[]", "[0,8]") + "}  ";
  const SafetensorsHeader header = parse_header(json, 20, "m.safetensors");
  ASSERT_EQ(header.tensors.size(), 2u);
  EXPECT_EQ(header.tensors[0].info, (TensorInfo{"early", DType::kI64, {}}));
  EXPECT_EQ(header.tensors[1].info, (TensorInfo{"late", DType::kBF16, {2, 3}}));
  EXPECT_EQ(header.tensors[1].begin, 8);
  EXPECT_EQ(header.metadata.at("format"), "pt");
}

TEST(SafetensorsHeader, TakesEmptyTensorsAndOddNames) {
  const std::string json =
      "{" + tensor(R"(a\nb\u0000\"ü)", "F32", "[0,4]", "[0,0]") + "," + tensor("", "F4", "[3,2]", "[0,3]") + "}";
  const SafetensorsHeader header = parse_header(json, 3, "m.safetensors");
  ASSERT_EQ(header.tensors.size(), 2u);
  EXPECT_EQ(header.tensors[0].info.name, std::string("a\nb\0\"ü", 7));
  EXPECT_EQ(header.tensors[1].info.shape, (Shape{3, 2}));
}

TEST(SafetensorsHeader, KnowsEveryDtypeByItsNameInCapitals) {
  for (const DType dtype : all_dtypes()) {
    const std::vector<TensorInfo> tensors{{"t", dtype, {2, 4}}};
    const int64_t bytes = bytes_of(dtype, 8);
    EXPECT_EQ(parse_header(format_header(tensors, {}), bytes, "m").tensors[0].info.dtype, dtype) << to_string(dtype);
  }
  EXPECT_THAT(error_of("{" + tensor("t", "f32", "[1]", "[0,4]") + "}", 4), HasSubstr("\"f32\""));
}

struct Hostile {
  std::string json;
  int64_t data_bytes;
  std::string complaint;
};

std::string nested(std::string_view open, int depth) {
  std::string text;
  for (int i = 0; i < depth; ++i) text += open;
  return text;
}

TEST(SafetensorsHeader, RefusesHostileHeadersWithOneClearLine) {
  const std::string two_64 = "18446744073709551616";
  const Hostile cases[] = {
      {"", 0, "does not begin with '{'"},
      {"[]", 0, "does not begin with '{'"},
      {"  {}", 0, "does not begin with '{'"},
      {"{", 0, "not JSON at byte"},
      {"{}x", 0, "not JSON at byte"},
      {"{}{}", 0, "not JSON at byte"},
      {"{\"a\xff\":{}}", 0, "not JSON at byte"},
      {"{}", 4, "4 bytes after the last tensor"},
      {R"({"a":1})", 0, "the number 1 is out of place"},
      {R"({"a":null})", 0, "null is out of place"},
      {R"({"a":[]})", 0, "an array is out of place"},
      {R"({"a":{}})", 0, "tensor \"a\": lacks dtype"},
      {R"({"a":{"dtype":"F32","shape":[1]}})", 4, "lacks data_offsets"},
      {R"({"a":{"dtype":"F32","data_offsets":[0,4]}})", 4, "lacks shape"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1}})", 4, "unknown field \"x\""},
      {R"({"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4, "dtype is there twice"},
      {R"({"a":{"dtype":["F32"],"shape":[1],"data_offsets":[0,4]}})", 4, "dtype: an array is out of place"},
      {R"({"a":{"dtype":"F32","shape":4,"data_offsets":[0,4]}})", 4, "shape: the number 4 is out of place"},
      {R"({"a":{"dtype":"F32","shape":[[1]],"data_offsets":[0,4]}})", 4, "shape: an array is out of place"},
      {R"({"a":{"dtype":"F32","shape":["1"],"data_offsets":[0,4]}})", 4, "shape: a string is out of place"},
      {R"({"a":{"dtype":"F32","shape":{},"data_offsets":[0,4]}})", 4, "shape: an object is out of place"},
      {R"({"__metadata__":{"a":1}})", 0, "__metadata__: the number 1 is out of place"},
      {R"({"__metadata__":{"a":{}}})", 0, "__metadata__: an object is out of place"},
      {R"({"__metadata__":{"a":"1","a":"2"}})", 0, "__metadata__: \"a\" is there twice"},
      {R"({"__metadata__":[]})", 0, "an array is out of place"},
      {R"({"__metadata__":{},"__metadata__":{}})", 0, "\"__metadata__\" is there twice"},
      {"{" + tensor("a", "F32", "[1]", "[0,4]") + "," + tensor("a", "F32", "[1]", "[4,8]") + "}", 8,
       "tensor \"a\" is there twice"},
      {"{" + tensor("a", "F33", "[1]", "[0,4]") + "}", 4, "dtype: \"F33\" is not one that Tessera knows"},
      {"{" + tensor("a", "F32", "[-1]", "[0,4]") + "}", 4, "shape: the number -1 is out of place"},
      {"{" + tensor("a", "F32", "[1.5]", "[0,4]") + "}", 4, "shape: the number 1.5 is out of place"},
      {"{" + tensor("a", "F32", "[1e999]", "[0,4]") + "}", 4, "not JSON at byte"},
      {"{" + tensor("a", "F32", "[" + two_64 + "]", "[0,4]") + "}", 4, "is out of place"},
      {"{" + tensor("a", "F32", "[9223372036854775808]", "[0,4]") + "}", 4, "9223372036854775808 is too large"},
      {"{" + tensor("a", "F32", "[4294967296,4294967296]", "[0,0]") + "}", 0, "tensor \"a\": "},
      {"{" + tensor("a", "F64", "[4611686018427387904]", "[0,0]") + "}", 0, "is too large"},
      {"{" + tensor("a", "U8", "[1,1,1,1,1,1,1,1,1]", "[0,1]") + "}", 1, "shape: more than 8 dims"},
      {"{" + tensor("a", "F32", "[2]", "[0,4]") + "}", 4, "takes 8 bytes, data_offsets [0, 4] give 4"},
      {"{" + tensor("a", "F4", "[3]", "[0,2]") + "}", 2, "shape 3 of f4 ends inside a byte"},
      {"{" + tensor("a", "F32", "[1]", "[4,0]") + "}", 4, "run backwards"},
      {"{" + tensor("a", "F32", "[1]", "[0]") + "}", 4, "1 numbers instead of two"},
      {"{" + tensor("a", "F32", "[1]", "[0,4,8]") + "}", 4, "more than two numbers"},
      {"{" + tensor("a", "F32", "[1]", "[0,4]") + "}", 3, "truncated?"},
      {"{" + tensor("a", "F32", "[1]", "[9223372036854775800,9223372036854775804]") + "}", 4, "truncated?"},
      {"{" + tensor("a", "F32", "[1]", "[4,8]") + "}", 8, "leaving a gap after those before it at 0"},
      {"{" + tensor("a", "F32", "[2]", "[0,8]") + "," + tensor("b", "F32", "[1]", "[4,8]") + "}", 8,
       "tensor \"b\": its bytes begin at 4, overlapping those before it at 8"},
      {"{" + tensor("a", "F32", "[1]", "[0,4]") + "}", 8, "4 bytes after the last tensor"},
      {"{\"a\":" + nested("[", 1'000'000), 0, "an array is out of place"},
      {"{\"a\":{\"dtype\":" + nested("{\"dtype\":", 1'000'000), 0, "dtype: an object is out of place"},
      {"{" + tensor("x\\ny", "F99", "[1]", "[0,4]") + "}", 4, "tensor \"x\\ny\""},
  };
  for (const Hostile& hostile : cases) {
    const std::string error = error_of(hostile.json, hostile.data_bytes);
    EXPECT_THAT(error, HasSubstr(hostile.complaint)) << hostile.json.substr(0, 200);
    EXPECT_THAT(error, HasSubstr("m.safetensors"));
    EXPECT_THAT(error, Not(HasSubstr("\n")));
    EXPECT_LT(error.size(), 400u);
  }
}

TEST(SafetensorsHeader, EveryTruncationOfAHeaderIsRefused) {
  const std::string json = "{" + tensor("a", "F32", "[1]", "[0,4]") + R"(,"__metadata__":{"k":"v"}})";
  ASSERT_EQ(error_of(json, 4), "accepted");
  for (size_t length = 0; length < json.size(); ++length)
    EXPECT_NE(error_of(json.substr(0, length), 4), "accepted") << length;
}

TEST(SafetensorsHeader, WritesWhatItReads) {
  const std::vector<TensorInfo> tensors{{"a\"b\n", DType::kF32, {2, 0}}, {"s", DType::kU8, {}}};
  const std::string json = format_header(tensors, {{"note", "two\nlines"}, {"version", "7"}});
  EXPECT_EQ(json.size() % 8, 0u);
  const SafetensorsHeader header = parse_header(json, 1, "m");
  EXPECT_EQ(header.tensors[0].info, (TensorInfo{"a\"b\n", DType::kF32, {2, 0}}));
  EXPECT_EQ(header.tensors[1].info, (TensorInfo{"s", DType::kU8, {}}));
  EXPECT_THAT(header.metadata, ElementsAre(Pair("note", "two\nlines"), Pair("version", "7")));
}

TEST(SafetensorsHeader, HeadersThatAreNotUtf8AreRefusedWithTheirBytesEscaped) {
  for (const std::string bytes : {"\xff", "\xed\xa0\x80", "\xc0\x80", "gr\xfc\xdf", "w\xc3("}) {
    const std::string error = error_of("{\"" + bytes + R"(":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4);
    EXPECT_THAT(error, HasSubstr("header: not JSON at byte"));
    EXPECT_EQ(printable(error), error);
  }
}

TEST(SafetensorsHeader, NamesThatAreNotUtf8AreRefused) {
  const TensorInfo tensor{"a\xff", DType::kU8, {1}};
  EXPECT_THROW(format_header({&tensor, 1}, {}), Error);
}

}  // namespace
}  // namespace tessera::checkpoint
