#include "bus/registration/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/fields_testing.h"
#include "bus/registration/manifest_testing.h"

namespace tessera::bus {
namespace {

using testing::HasSubstr;

TEST(Manifest, ComesBackAsItWasWritten) {
  const Manifest manifest{{entry("a", {4, 6}, "2:S0"), entry("b", {}, "2:R", DType::kI64), entry("c", {0, 3}, "2:S0")}};
  const Manifest read = read_message<Manifest>(message_bytes(manifest), "manifest");
  ASSERT_EQ(names(read), names(manifest));
  EXPECT_EQ(read.entries[0].layout, manifest.entries[0].layout);
  EXPECT_EQ(read.entries[1].dtype, DType::kI64);
  EXPECT_EQ(read.hash(), manifest.hash());
}

// A few bytes from a peer cannot make it allocate much: a layout of a million ranks takes eleven bytes.
TEST(Manifest, TakesMemoryInProportionToItsBytes) {
  const auto write = [](size_t layouts, size_t tensors) {
    ByteWriter out;
    out.put(static_cast<uint32_t>(layouts));
    for (size_t i = 0; i < layouts; ++i) out.put_string("1048576:R");
    out.put(static_cast<uint32_t>(tensors));
    for (size_t i = 0; i < tensors; ++i) {
      out.put_string(std::to_string(i));
      out.put(DType::kF32);
      out.put(uint8_t{0});
      out.put(uint32_t{0});
      out.put_string("");   // its source
      out.put(uint8_t{0});  // all of it
      out.put(uint8_t{0});  // not quantised
    }
    return out.take();
  };
  const Manifest read = read_message<Manifest>(write(1, 2), "manifest");
  EXPECT_EQ(read.entries[0].layout.mesh().ranks().data(), read.entries[1].layout.mesh().ranks().data());
  EXPECT_THROW(read_message<Manifest>(write(17, 1), "manifest"), Error);
}

TEST(Manifest, WireFormatsAreWrittenAndPartOfTheHash) {
  Manifest manifest{{entry("plain", {4, 6}, "2:S0")}};
  for (const Format format : all_formats())
    manifest.entries.push_back(quantised(entry(std::string(to_string(format)), {4, 6}, "2:S0"), format));
  manifest.entries[1].planes = {.row = true};
  manifest.entries[2].planes = {.column = true};
  manifest.entries[3].planes = {.row = true, .column = true};
  manifest.entries[4].fused = {.name = "qkv", .place = std::nullopt};
  manifest.entries[5].fused = {.name = "qkv", .place = {{.row = 3, .column = 4}}};
  const Manifest read = read_message<Manifest>(message_bytes(manifest), "manifest");
  EXPECT_EQ(read.entries.front().wire, std::nullopt);
  for (size_t i = 0; i < all_formats().size(); ++i) {
    EXPECT_EQ(read.entries[i + 1].wire, all_formats()[i]);
    EXPECT_EQ(read.entries[i + 1].planes, manifest.entries[i + 1].planes);
    EXPECT_EQ(read.entries[i + 1].fused, manifest.entries[i + 1].fused);
  }
  const std::string hash = manifest.hash();
  manifest.entries.front().wire = Format::kMxfp8;
  EXPECT_NE(manifest.hash(), hash);
}

// Reads how a tensor q is to travel.
void read_wire(std::span<const std::byte> bytes) {
  ByteReader in(bytes, "manifest");
  FieldReader fields(in);
  ManifestEntry q{.name = "q"};
  WireByte::field(fields, q);
}

TEST(Manifest, UnknownWireFormatsAreErrors) {
  for (const int wire : {int(all_formats().size()) + 1, 255, 16, 48, 128}) {
    const auto byte = static_cast<std::byte>(wire);
    EXPECT_THROW(read_wire({&byte, 1}), Error) << wire;
  }
}

TEST(Manifest, EveryTruncationIsAnError) {
  expect_exact(Manifest{{entry("a", {4, 6}, "2:S0"), entry("b", {8}, "2:R")}});
}

TEST(Manifest, ComesBackAsItIsDrawn) {
  expect_fields_hold<Manifest>();
  expect_fields_hold<ManifestDiff>();
}

TEST(Manifest, ATensorThatOccursTwiceIsNamed) {
  const Manifest twice{{entry("a", {8}, "2:R"), entry("b", {8}, "2:R"), entry("b", {8}, "2:S0")}};
  EXPECT_THAT([&] { read_message<Manifest>(message_bytes(twice), "manifest"); },
              testing::ThrowsMessage<Error>(HasSubstr("tensor b occurs twice")));
}

TEST(Manifest, APartOfAFusedTensorBeginsInsideAnyMemory) {
  for (const Index column : {Index{-1}, Index{1} << 49}) {
    ByteWriter out;
    FieldWriter fields(out);
    const ManifestEntry entry{.wire = Format::kNvfp4,
                              .fused = {.name = "qkv", .place = {{.row = 0, .column = column}}}};
    WireByte::field(fields, entry);
    EXPECT_THAT([&] { read_wire(out.view()); },
                testing::ThrowsMessage<Error>(HasSubstr("tensor q: a part of a fused matrix at [0, ")));
  }
}

}  // namespace
}  // namespace tessera::bus
