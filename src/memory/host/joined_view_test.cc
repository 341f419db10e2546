#include "memory/host/joined_view.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "memory/host/mapped_arena.h"
#include "memory/host/shared_arena.h"
#include "tessera/memory.h"

namespace tessera {
namespace {

const size_t kPage = static_cast<size_t>(::sysconf(_SC_PAGESIZE));

SharedBuffer pages_of(size_t bytes, char value) {
  SharedBuffer buffer = SharedHeap::process().allocate(bytes, 4096);
  std::memset(buffer.data(), value, bytes);
  return buffer;
}

JoinedView::Part part_of(const SharedBuffer& buffer) {
  return {.data = buffer.data(), .bytes = buffer.size()};
}

std::string text_of(const JoinedView& view) {
  return {reinterpret_cast<const char*>(view.data()), view.bytes()};
}

TEST(JoinedView, ShowsItsPartsBehindEachOtherAndWhatIsWrittenThere) {
  const SharedBuffer first = pages_of(2 * kPage, 'a'), second = pages_of(kPage, 'b'), third = pages_of(100, 'c');
  const std::array parts{part_of(second), part_of(first), part_of(third)};
  const auto view = JoinedView::of(parts);
  ASSERT_NE(view, nullptr);
  EXPECT_EQ(text_of(*view), std::string(kPage, 'b') + std::string(2 * kPage, 'a') + std::string(100, 'c'));
  first.data()[kPage] = std::byte{'x'};
  EXPECT_EQ(view->data()[2 * kPage], std::byte{'x'});
  EXPECT_FALSE(view->detached());
}

TEST(JoinedView, LivesLongerThanTheMappingsOfItsParts) {
  std::unique_ptr<JoinedView> view;
  {
    SharedArena arena(1, SharedArena::kHugePage);
    std::byte* const own = arena.allocate(kPage, kPage);
    std::memset(own, 'o', kPage);
    const MappedArena peers(UniqueFd(::fcntl(arena.fd_for_peer(), F_DUPFD_CLOEXEC, 0)), arena.bytes(), "a peer");
    const std::array parts{JoinedView::Part{.data = peers.data(), .bytes = kPage},
                           JoinedView::Part{.data = own, .bytes = kPage}};
    view = JoinedView::of(parts);
    ASSERT_NE(view, nullptr);
  }
  EXPECT_EQ(text_of(*view), std::string(2 * kPage, 'o'));
}

TEST(JoinedView, KeepsItsAddressAndContentsWhenDetachedWhileOthersRead) {
  const SharedBuffer first = pages_of(64 * kPage, 'a'), second = pages_of(64 * kPage, 'a');
  const std::array parts{part_of(first), part_of(second)};
  for (int round = 0; round < 20; ++round) {
    const auto view = JoinedView::of(parts);
    ASSERT_NE(view, nullptr);
    const std::byte* const data = view->data();
    std::atomic<bool> over{false};
    std::atomic<int> passes{0};
    std::thread reader([&] {
      while (!over) {
        EXPECT_TRUE(std::all_of(data, data + view->bytes(), [](std::byte b) { return b == std::byte{'a'}; }));
        ++passes;
      }
    });
    while (passes < 1) std::this_thread::yield();
    view->detach();
    over = true;
    reader.join();
    EXPECT_TRUE(view->detached());
    EXPECT_EQ(view->data(), data);
    first.data()[0] = std::byte{'x'};
    EXPECT_EQ(data[0], std::byte{'a'});
    first.data()[0] = std::byte{'a'};
    view->detach();  // once more changes nothing
  }
}

TEST(JoinedView, IsNoneWherePagesDoNotFit) {
  const SharedBuffer whole = pages_of(kPage, 'a'), odd = pages_of(kPage + 64, 'b');
  const auto of = [](std::vector<JoinedView::Part> parts) { return JoinedView::of(parts); };
  EXPECT_EQ(of({}), nullptr);
  EXPECT_EQ(of({part_of(odd), part_of(whole)}), nullptr);  // the second would begin within a page
  EXPECT_EQ(of({{.data = whole.data() + 64, .bytes = 64}}), nullptr);
  EXPECT_EQ(of({part_of(whole), {.data = whole.data(), .bytes = 0}}), nullptr);
  EXPECT_NE(of({part_of(whole), part_of(odd)}), nullptr);
}

TEST(JoinedView, IsNoneOfPrivateMemory) {
  void* const own = ::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(own, MAP_FAILED);
  const std::array parts{JoinedView::Part{.data = static_cast<std::byte*>(own), .bytes = kPage}};
  EXPECT_EQ(JoinedView::of(parts), nullptr);
  ::munmap(own, kPage);
}

TEST(JoinedView, LeavesTheProcessMostOfItsMappings) {
  const SharedBuffer page = pages_of(kPage, 'a');
  std::vector<JoinedView::Part> parts(1024, part_of(page));
  std::vector<std::unique_ptr<JoinedView>> views;
  while (auto view = JoinedView::of(parts)) {
    views.push_back(std::move(view));
    ASSERT_LT(views.size(), 4096U);
  }
  EXPECT_GE(views.size(), 4U);
  EXPECT_LE(views.size(), 65536U);
  views.front()->detach();  // which leaves one mapping of it
  EXPECT_NE(JoinedView::of(parts), nullptr);
  views.pop_back();
  const auto last = JoinedView::of(parts);
  EXPECT_NE(last, nullptr);
}

TEST(JoinedViewDeathTest, IsNotWritten) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  const SharedBuffer page = pages_of(kPage, 'a');
  const std::array parts{part_of(page)};
  const auto view = JoinedView::of(parts);
  ASSERT_NE(view, nullptr);
  EXPECT_DEATH(const_cast<std::byte*>(view->data())[0] = std::byte{'x'}, "");
  EXPECT_EQ(page.data()[0], std::byte{'a'});
}

}  // namespace
}  // namespace tessera
