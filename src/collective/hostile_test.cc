// What ranks that misbehave can do to a group: fail it.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <list>

#include "base/socket.h"
#include "collective/group_testing.h"
#include "collective/hostile_testing.h"
#include "collective/messages.h"
#include "collective/shared/bells.h"
#include "collective/shared/page.h"
#include "collective/shared/shared_pages.h"
#include "tessera/memory.h"

namespace tessera::collective {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::Each;
using testing::HasSubstr;
using testing::MatchesRegex;
using testing::Not;
using testing::Property;

// Rank 0 of two; the test is rank 1, and writes its page.
class Hostile : public testing::Test {
 protected:
  static constexpr uint32_t kSlots = 4;
  static constexpr uint64_t kKey = 0x11112222;

  Hostile() {
    page_.set_state(RankState::kHere);
    const Exchange exchange = [](const std::string& own) { return blobs_of_two(own, kKey); };
    group_ = Group::form(exchange, {.rank = 0,
                                    .size = 2,
                                    .name = "hostile",
                                    .timeout = std::chrono::milliseconds(10),
                                    .device = &device_,
                                    .slots = kSlots,
                                    .in_process = true});
  }

  // The call's error is the group's from then on.
  void expect_failure(const std::function<void()>& call, const testing::Matcher<std::string>& text) {
    const std::string error = error_of(call);
    EXPECT_THAT(error, text);
    EXPECT_EQ(error_of([&] { group_->barrier("later"); }), error);
    EXPECT_FALSE(group_->status().ok());
  }

  device::CpuDevice device_{device::DeviceOptions{}};
  std::shared_ptr<SharedPages> pages_ = SharedPages::create_in_process(Page::bytes_for(kSlots), kKey);
  Page page_ = Page::create(pages_->data(), 1, 2, kSlots);
  std::shared_ptr<Group> group_;
};

TEST_F(Hostile, AWordGoesBack) {
  page_.word(Word::kPublished, 1).store(5);
  EXPECT_EQ(group_->get(1, Word::kPublished, 1), 5U);
  page_.word(Word::kPublished, 1).store(3);
  expect_failure([&] { group_->get(1, Word::kPublished, 1); },
                 AllOf(HasSubstr("rank 1"), HasSubstr("its word 'published' of slot 1 says 3 after 5")));
}

TEST_F(Hostile, AWordIsTooLarge) {
  page_.word(Word::kClosed, kWholeRank).store(kMaxWordValue + 1);
  expect_failure([&] { group_->get(1, Word::kClosed, kWholeRank); }, HasSubstr("its word 'closed'"));
}

TEST_F(Hostile, AGradientIsOfNoDtype) {
  page_.gradient(2, 1).dtype.store(77);
  page_.gradient(2, 1).key.store(round_word(3, 2));
  expect_failure([&] { group_->gradient(1, 2, 3, 1); }, HasSubstr("its gradient of slot 2 is of dtype 77"));
}

TEST_F(Hostile, TheMailIsAhead) {
  page_.step().store(5);
  expect_failure([&] { group_->barrier("now"); }, HasSubstr("its mail says step 5 after 1"));
}

TEST_F(Hostile, TheMailIsLongerThanAnyBlob) {
  page_.mail(1).header = {.number = 1, .kind = CallKind::kExchange, .bytes = Group::kMaxBlobBytes + 1};
  page_.step().store(1);
  expect_failure([&] { group_->exchange("", "blob"); }, HasSubstr("at most 268435456 are taken"));
}

TEST_F(Hostile, TheMailIsNoCall) {
  page_.mail(1).header = {.number = 1, .kind = static_cast<CallKind>(99), .what_bytes = 9999, .bytes = 0};
  page_.mail(1).header.what = {'\x1b', '[', '2', 'J'};
  page_.step().store(1);
  expect_failure([&] { group_->barrier("now"); },
                 AllOf(HasSubstr("an unknown call"), HasSubstr("\\x1b[2J"), Not(HasSubstr("\x1b"))));
}

TEST_F(Hostile, TheRefusalHasNoCode) {
  page_.mail(1).header = {.number = 1, .kind = CallKind::kRefused, .code = 99};
  page_.step().store(1);
  expect_failure([&] { group_->barrier("now"); },
                 AllOf(HasSubstr("rank 1"), HasSubstr("refuses a call with code 99 and 0 bytes")));
}

TEST_F(Hostile, TheRefusalIsLongerThanItsMail) {
  page_.mail(1).header = {.number = 1, .kind = CallKind::kRefused, .bytes = uint64_t{1} << 40, .code = 1};
  page_.step().store(1);
  expect_failure([&] { group_->barrier("now"); }, HasSubstr("rank 1"));
}

TEST_F(Hostile, TheRefusalIsOfAnotherCall) {
  page_.mail(1).header = {.number = 2, .kind = CallKind::kRefused, .code = 1};
  page_.step().store(1);
  expect_failure([&] { group_->barrier("now"); },
                 AllOf(HasSubstr("barrier 'now'"), HasSubstr("refusal '' of 0 bytes (number 2)")));
}

TEST_F(Hostile, TheRefusalHasNoText) {
  page_.mail(1).header = {.number = 1, .kind = CallKind::kRefused, .code = 3};
  page_.step().store(1);
  EXPECT_EQ(error_of([&] { group_->barrier("now"); }), "not-found: rank 1: it gave no reason");
  EXPECT_TRUE(group_->status().ok());
}

TEST_F(Hostile, TheStateIsNone) {
  page_.set_failure(Status(ErrorCode::kDataLoss, "a reason \x1b[2J"));
  page_.set_state(static_cast<RankState>(17));
  expect_failure([&] { group_->require_present(1); }, HasSubstr("data-loss: a reason \\x1b[2J"));
}

TEST_F(Hostile, TheStateIsFailedWithoutAText) {
  for (const uint64_t code : {0, 3}) {
    SCOPED_TRACE(code);
    page_.set_failure(Status(static_cast<ErrorCode>(code), ""));
    expect_failure([&] { group_->barrier("now"); },
                   MatchesRegex("peer-lost: rank 1 \\(pid [0-9]+\\) has failed and gave no reason"));
  }
}

TEST_F(Hostile, TheStateIsNoneWithoutAText) {
  page_.set_state(static_cast<RankState>(UINT64_MAX));
  expect_failure([&] { group_->require_present(1); }, HasSubstr("has failed and gave no reason"));
}

TEST_F(Hostile, TheStateGoesBack) {
  EXPECT_TRUE(group_->status().ok());
  std::memset(pages_->data() + 64, 0, sizeof(uint64_t));
  expect_failure([&] { group_->barrier("now"); }, AllOf(HasSubstr("rank 1"), HasSubstr("its state says 0 after 1")));
}

TEST_F(Hostile, TheDeadlineOfACallFailsTheGroup) {
  expect_failure([&] { group_->barrier("end"); },
                 AllOf(HasSubstr("deadline-exceeded"), HasSubstr("to call barrier 'end'"), HasSubstr("rank 1")));
}

// A rank shows places that it does not have: through descriptors, as between processes.
TEST(HostilePlaces, FailTheGroup) {
  const auto statuses_of = [](const std::function<void(MemoryRef&)>& change) {
    return run_ranks({.sockets = true}, [&](Group& group) {
      const SharedBuffer memory = SharedHeap::process().allocate(4096);
      MemoryRef place = group.refer(memory.data(), 4096);
      if (group.rank() == 1) change(place);
      group.set_gradient(0, 0, 0, {.memory = place});
      group.barrier("shown");
      if (group.rank() == 0) {
        const auto shown = group.gradient(1, 0, 0, 0);
        group.map(1, shown.value().memory);
      }
      group.barrier("read");
    });
  };
  const auto says = [](const auto& text) { return Property(&Status::message, AllOf(HasSubstr("rank 1"), text)); };
  EXPECT_THAT(statuses_of([](MemoryRef& place) { place.arena = 9999; }),
              Each(says(HasSubstr("its arena 9999, and has none of that number"))));
  EXPECT_THAT(statuses_of([](MemoryRef& place) { place.offset = UINT64_MAX - 100; }),
              Each(says(HasSubstr("it names 4096 bytes at 18446744073709551515 of its arena"))));
  EXPECT_THAT(statuses_of([](MemoryRef& place) { place.bytes = uint64_t{1} << 40; }),
              Each(says(HasSubstr("it names 1099511627776 bytes"))));
}

// Processes that are not in the group connect to its sockets while it forms.
TEST(Strangers, DoNotKeepAGroupFromForming) {
  const TestRuntimeFolder folder;
  InProcessExchange exchange(2);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank)
    ranks.push_back(start_thread("rank", [&, rank] {
      device::CpuDevice device({.rank = rank});
      const Exchange inner = exchange.of_rank(rank, device, std::chrono::seconds(60));
      std::list<UniqueFd> strangers;
      const Exchange with_strangers = [&](const std::string& blob) {
        const auto own = read_message<Bootstrap>(std::as_bytes(std::span(blob)), "own");
        for (const size_t bytes : {0U, 1U, 20U, 1000U}) {
          strangers.push_back(connect_unix(own.socket, soon()));
          const std::vector<std::byte> noise(bytes, std::byte{0x54});
          if (bytes > 0) send_some(strangers.back().get(), noise);
        }
        return inner(blob);
      };
      const auto group = Group::form(with_strangers, {.rank = rank, .size = 2, .device = &device, .slots = 4});
      group->barrier("formed");
      group->close(soon());
    }));
  for (std::thread& rank : ranks) rank.join();
}

// Pages
// ----------------------------------------------------------------------------------------------------------------

TEST(Pages, AreRefusedIfTheyAreAnothersOrTooSmall) {
  const auto memory = SharedPages::create_in_process(Page::bytes_for(4), 3);
  const auto open = [&](size_t bytes, uint32_t rank) {
    return error_of([&] { Page::open(memory->data(), bytes, rank, 2, 4, "rank 1"); });
  };
  EXPECT_THAT(open(memory->bytes(), 1), HasSubstr("run the same release"));
  Page::create(memory->data(), 1, 2, 4);
  EXPECT_EQ(open(memory->bytes(), 1), "(no error)");
  EXPECT_THAT(open(memory->bytes(), 0), HasSubstr("it says rank 1 of 2 with 4 slots, not rank 0"));
  EXPECT_THAT(open(4096, 1), HasSubstr("4 slots need"));
}

TEST(Pages, OnlyTheirMakerWritesThem) {
  const auto own = SharedPages::create(8192, SharedPages::Writers::kMaker);
  own->data()[5000] = std::byte{7};
  EXPECT_EQ(::mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, own->fd(), 0), MAP_FAILED);
  EXPECT_NE(::ftruncate(own->fd(), 4096), 0);
  const auto theirs = SharedPages::open(duplicate_fd(own->fd()), 8192, SharedPages::Writers::kMaker, "rank 1");
  EXPECT_EQ(theirs->data()[5000], std::byte{7});
  EXPECT_THAT(
      error_of([&] { SharedPages::open(duplicate_fd(own->fd()), 8193, SharedPages::Writers::kMaker, "rank 1"); }),
      HasSubstr("8192 bytes instead of 8193"));
  UniqueFd unsealed(::memfd_create("page", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(unsealed.get(), 8192), 0);
  EXPECT_THAT(error_of([&] { SharedPages::open(std::move(unsealed), 8192, SharedPages::Writers::kMaker, "rank 1"); }),
              HasSubstr("not a memfd sealed against shrinking"));
}

TEST(BellPage, WakesWhoHasAnnouncedSleep) {
  const auto pages = SharedPages::create_in_process(Bells::bytes_for(2), 5);
  Bells sleeper(pages, 0, 2);
  Bells ringer(pages, 1, 2);
  std::atomic<int> value{0};
  std::thread thread = start_thread("sleeper", [&] {
    for (int i = 1; i <= 1000; ++i) EXPECT_TRUE(sleeper.wait([&] { return value.load() >= i; }, soon()));
  });
  for (int i = 1; i <= 1000; ++i) {
    value.store(i);
    ringer.ring_sleepers();
    if (i % 10 == 0) std::this_thread::yield();
  }
  thread.join();
  EXPECT_FALSE(sleeper.wait([] { return false; }, Deadline::after(std::chrono::milliseconds(5))));
}

}  // namespace
}  // namespace tessera::collective
