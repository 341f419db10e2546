#include "memory/host/mapped_arena.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstring>

#include "base/testing.h"
#include "memory/host/shared_arena.h"

namespace tessera {
namespace {

UniqueFd copy_of(int fd) {
  return UniqueFd(::dup(fd));
}

TEST(MappedArena, SeesWhatTheOwnerWrites) {
  SharedArena arena(1, SharedArena::kHugePage);
  const MappedArena mapped(copy_of(arena.fd_for_peer()), arena.bytes(), "trainer/0");
  ASSERT_NE(mapped.data(), nullptr);
  std::strcpy(reinterpret_cast<char*>(arena.data()) + 12345, "weights");
  EXPECT_STREQ(reinterpret_cast<const char*>(mapped.data()) + 12345, "weights");
  std::array<std::byte, 7> bytes{};
  EXPECT_EQ(mapped.read(12345, bytes), Status());
  EXPECT_EQ(std::memcmp(bytes.data(), "weights", 7), 0);
}

TEST(MappedArena, KeepsNoDescriptorOnceItIsMapped) {
  SharedArena arena(1, SharedArena::kHugePage);
  const size_t before = open_fds();
  const MappedArena mapped(copy_of(arena.fd_for_peer()), arena.bytes(), "trainer/0");
  EXPECT_EQ(open_fds(), before);
}

TEST(MappedArena, IsNotMappedWhenItCouldShrinkAndReadsSurviveThat) {
  UniqueFd fd(::memfd_create("foreign", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(fd.get(), 8192), 0);
  ASSERT_EQ(::pwrite(fd.get(), "weights", 7, 4096), 7);
  const MappedArena mapped(copy_of(fd.get()), 8192, "trainer/0");
  EXPECT_EQ(mapped.data(), nullptr);
  std::array<std::byte, 7> bytes{};
  EXPECT_EQ(mapped.read(4096, bytes), Status());
  EXPECT_EQ(std::memcmp(bytes.data(), "weights", 7), 0);
  ASSERT_EQ(::ftruncate(fd.get(), 100), 0);
  EXPECT_EQ(mapped.read(4096, bytes).code(), ErrorCode::kPeerLost);
}

TEST(MappedArena, RefusesWhatIsNotAsAnnounced) {
  SharedArena arena(1, SharedArena::kHugePage);
  EXPECT_THROW(MappedArena(copy_of(arena.fd_for_peer()), arena.bytes() + 1, "trainer/0"), Error);
  EXPECT_THROW(MappedArena(copy_of(arena.fd_for_peer()), 0, "trainer/0"), Error);
  EXPECT_THROW(MappedArena(UniqueFd(), 4096, "trainer/0"), Error);
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const UniqueFd read_end(ends[0]);
  EXPECT_THROW(MappedArena(UniqueFd(ends[1]), 4096, "trainer/0"), Error);
}

}  // namespace
}  // namespace tessera
