#include "transport/memory_desc.h"

#include <gtest/gtest.h>

#include "memory/host/shared_arena.h"
#include "tessera/error.h"
#include "tessera/memory.h"

namespace tessera {
namespace {

MemoryDesc round_trip(const MemoryDesc& memory) {
  ByteWriter out;
  memory.write(out);
  ByteReader in(out.view(), "memory");
  const MemoryDesc read = MemoryDesc::read(in);
  in.finish();
  return read;
}

TEST(MemoryDesc, SurvivesTheWire) {
  const MemoryDesc memory{.kind = MemoryDesc::Kind::kShared, .arena = 7, .offset = 4096, .bytes = 123};
  EXPECT_EQ(round_trip(memory), memory);
  const ArenaDesc arena{.id = 7, .bytes = 8192};
  ByteWriter out;
  arena.write(out);
  ByteReader in(out.view(), "arena");
  EXPECT_EQ(ArenaDesc::read(in), arena);
}

TEST(MemoryDesc, RefusesRangesThatWrapAroundAndUnknownKinds) {
  EXPECT_THROW(round_trip({.offset = UINT64_MAX - 10, .bytes = 20}), Error);
  EXPECT_THROW(round_trip({.offset = 0, .bytes = UINT64_MAX}), Error);
  EXPECT_THROW(round_trip({.kind = static_cast<MemoryDesc::Kind>(3)}), Error);
  ByteWriter out;
  ArenaDesc{.id = 1, .bytes = 0}.write(out);
  ByteReader in(out.view(), "arena");
  EXPECT_THROW(ArenaDesc::read(in), Error);
}

TEST(DescribeMemory, TellsSharedBlocksFromPrivateMemory) {
  const SharedBuffer buffer = SharedHeap::process().allocate(100);
  const MemoryDesc shared = describe_memory(buffer.data() + 10, 90);
  EXPECT_EQ(shared.kind, MemoryDesc::Kind::kShared);
  EXPECT_EQ(shared.offset, SharedHeap::process().locate(buffer.data(), 100)->offset + 10);
  int on_the_stack = 0;
  const MemoryDesc private_memory = describe_memory(&on_the_stack, sizeof(on_the_stack));
  EXPECT_EQ(private_memory.kind, MemoryDesc::Kind::kPrivate);
  EXPECT_EQ(private_memory.offset, reinterpret_cast<uintptr_t>(&on_the_stack));
}

}  // namespace
}  // namespace tessera
