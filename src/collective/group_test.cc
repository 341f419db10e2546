#include "collective/group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <latch>
#include <limits>

#include "base/fields_testing.h"
#include "collective/group_testing.h"
#include "collective/messages.h"
#include "collective/shared/page.h"
#include "tessera/memory.h"
#include "tessera/store.h"

namespace tessera::collective {
namespace {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using testing::Property;

constexpr auto message = [](auto matcher) { return Property(&Status::message, matcher); };

// Ranks on threads of one process, and with all that processes have between them.
class Groups : public testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  static TestRanks ranks() { return {.size = std::get<0>(GetParam()), .sockets = std::get<1>(GetParam())}; }
};
INSTANTIATE_TEST_SUITE_P(All, Groups, testing::Combine(testing::Values(1, 2, 3, 4), testing::Bool()),
                         [](const auto& test) {
                           return std::to_string(std::get<0>(test.param)) +
                                  (std::get<1>(test.param) ? "Sockets" : "Threads");
                         });

TEST_P(Groups, ExchangesBlobsOfAnySize) {
  run_ranks_well(ranks(), [](Group& group) {
    for (const size_t bytes : {size_t{0}, size_t{1}, size_t{1000}, kMailBytes, kMailBytes + 1, 5 * kMailBytes / 2}) {
      const size_t own = bytes * static_cast<size_t>(group.rank() + 1) / static_cast<size_t>(group.size());
      const auto blobs = group.exchange("sizes", std::string(own, static_cast<char>('a' + group.rank())));
      ASSERT_EQ(blobs.size(), static_cast<size_t>(group.size()));
      for (int rank = 0; rank < group.size(); ++rank) {
        const size_t expected = bytes * static_cast<size_t>(rank + 1) / static_cast<size_t>(group.size());
        EXPECT_EQ(blobs[static_cast<size_t>(rank)], std::string(expected, static_cast<char>('a' + rank)));
      }
    }
  });
}

TEST_P(Groups, TakesTheMaximumOfAll) {
  constexpr size_t kValues = 40'000;  // of several mails
  run_ranks_well(ranks(), [](Group& group) {
    std::vector<float> values(kValues);
    const auto value_of = [](int rank, size_t i) {
      return static_cast<float>((i + 1) * 7919 * static_cast<size_t>(rank + 3) % 1000) - 500;
    };
    for (size_t i = 0; i < kValues; ++i) values[i] = value_of(group.rank(), i);
    if (group.rank() == group.size() - 1) values[7] = std::numeric_limits<float>::quiet_NaN();
    group.max_exchange(values);
    for (size_t i = 0; i < kValues; ++i) {
      if (i == 7) continue;
      float expected = value_of(0, i);
      for (int rank = 1; rank < group.size(); ++rank) expected = std::max(expected, value_of(rank, i));
      ASSERT_EQ(values[i], expected) << i;
    }
    EXPECT_TRUE(std::isnan(values[7]));
    group.max_exchange({});
  });
}

TEST_P(Groups, PassesBarriersTogether) {
  std::atomic<int> passed{0};
  run_ranks_well(ranks(), [&](Group& group) {
    for (int round = 0; round < 50; ++round) {
      ++passed;
      group.barrier("round");
      EXPECT_GE(passed.load(), (round + 1) * group.size());
    }
  });
}

TEST_P(Groups, ShowsWordsAndWakesSleepers) {
  run_ranks_well(ranks(), [](Group& group) {
    constexpr uint64_t kLast = 100;
    const int next = (group.rank() + 1) % group.size();
    for (uint64_t value = 1; value <= kLast; ++value) {
      group.set(Word::kPublished, 3, value);
      group.device().wait_host(*group.at_least(next, Word::kPublished, 3, value, "a version"), group.deadline());
      EXPECT_GE(group.get(next, Word::kPublished, 3), value);
    }
    group.set(Word::kRetired, kWholeRank, 5);
    group.device().wait_host(*group.all_at_least(Word::kRetired, kWholeRank, 5, "5"), group.deadline());
    EXPECT_EQ(group.get(next, Word::kProduced, 3), 0U);
  });
}

TEST_P(Groups, ReadsMemoryOfPeers) {
  run_ranks_well(ranks(), [](Group& group) {
    constexpr size_t kBytes = 100'000;
    const SharedBuffer buffer = SharedHeap::process().allocate(kBytes);
    std::fill_n(buffer.data(), kBytes, static_cast<std::byte>(group.rank() + 1));
    const MemoryRef own = group.refer(buffer.data() + 64, kBytes - 64);
    group.set_gradient(9, 2, 5, {.memory = own, .dtype = DType::kBF16});
    group.barrier("shown");
    EXPECT_FALSE(group.gradient(0, 9, 2, 4).has_value());
    EXPECT_FALSE(group.gradient(0, 9, 1, 5).has_value());
    for (int rank = 0; rank < group.size(); ++rank) {
      const auto shown = group.gradient(rank, 9, 2, 5);
      ASSERT_TRUE(shown.has_value());
      EXPECT_EQ(shown->dtype, DType::kBF16);
      const std::byte* const theirs = group.map(rank, shown->memory);
      EXPECT_EQ(std::count(theirs, theirs + kBytes - 64, static_cast<std::byte>(rank + 1)), kBytes - 64);
    }
    group.barrier("read");
  });
}

TEST_P(Groups, LeavesNothingBehind) {
  const size_t fds = open_fds();
  run_ranks_well(ranks(), [](Group& group) { group.barrier("once"); });
  EXPECT_EQ(open_fds(), fds);
}

TEST_P(Groups, FailsAsAWhole) {
  const TestRanks all = ranks();
  const auto statuses = run_ranks(all, [&](Group& group) {
    if (group.rank() == group.size() - 1) {
      group.fail(Status(ErrorCode::kDataLoss, "the last rank gives up"));
      group.barrier("never");
    }
    group.device().wait_host(*group.at_least(group.size() - 1, Word::kPublished, 0, 1, "a version"), group.deadline());
  });
  EXPECT_THAT(statuses, Each(message(HasSubstr("the last rank gives up"))));
}

TEST_P(Groups, NamesBothCallsThatDoNotMatch) {
  if (ranks().size < 2) return;
  const auto statuses = run_ranks(ranks(), [](Group& group) {
    if (group.rank() == 1) {
      group.barrier("other");
    } else {
      std::vector<float> values(10);
      group.max_exchange(values);
    }
  });
  EXPECT_THAT(statuses, Each(message(AllOf(HasSubstr("max_exchange '' of 40 bytes (number 1)"),
                                           HasSubstr("barrier 'other' of 0 bytes (number 1)"), HasSubstr("rank 1")))));
}

// Calls of several mails, too: a refusal ends them in their first step. A rank that refuses goes on at once, and may do
// so again.
TEST_P(Groups, TellsARefusalAndLives) {
  if (ranks().size < 2) return;
  run_ranks_well(ranks(), [](Group& group) {
    const auto refuses = [&](int refuser, const std::function<void()>& call) {
      if (group.rank() == refuser) return group.refuse("wrap", {ErrorCode::kInvalidArgument, "13 rows cannot be cut"});
      EXPECT_EQ(error_of(call), fmt::format("rank {}: 13 rows cannot be cut", refuser));
    };
    for (int refuser = 0; refuser < group.size(); ++refuser) {
      refuses(refuser, [&] { group.exchange("sizes", std::string(5 * kMailBytes / 2, 'x')); });
      refuses(refuser, [&] { group.barrier("wrap"); });
      std::vector<float> values(40'000);
      refuses(refuser, [&] { group.max_exchange(values); });
      const auto blobs = group.exchange("next", std::string(2 * kMailBytes, static_cast<char>('a' + group.rank())));
      for (int rank = 0; rank < group.size(); ++rank)
        EXPECT_EQ(blobs[static_cast<size_t>(rank)], std::string(2 * kMailBytes, static_cast<char>('a' + rank)));
    }
    refuses(1, [&] { group.sum_exchange({}); });
    EXPECT_EQ(group.sum_exchange({}).size(), 0U);
  });
}

TEST_P(Groups, TellsTheRefusalOfTheLowestRank) {
  run_ranks_well(ranks(), [](Group& group) {
    const int last = group.size() - 1;
    if (group.rank() < last) group.refuse("", {ErrorCode::kMismatch, fmt::format("reason {}\x1b", group.rank())});
    if (group.rank() == last && last > 0) {
      EXPECT_EQ(error_of([&] { group.barrier("refused"); }), "mismatch: rank 0: reason 0\\x1b");
    } else if (last == 0) {
      group.refuse("", {ErrorCode::kMismatch, "nobody reads it"});
    }
    group.barrier("next");
    EXPECT_THAT(error_of([&] { group.refuse("nothing", Status()); }), HasSubstr("a refusal of 'nothing' without"));
  });
}

// A rank that does not come to the refused call is named, as in any other call.
TEST_P(Groups, ARefusalToNobodyEndsAtTheDeadlineOfTheNextCall) {
  if (ranks().size < 2) return;
  TestRanks all = ranks();
  all.timeout = std::chrono::milliseconds(300);
  const auto statuses = run_ranks(all, [](Group& group) {
    if (group.rank() == 0) {
      group.refuse("first", {ErrorCode::kMismatch, "a reason"});
      group.barrier("second");
    } else {
      group.device().wait_host(*group.at_least(0, Word::kPublished, 0, 1, "a version"), soon());
    }
  });
  EXPECT_THAT(statuses, Each(message(AllOf(HasSubstr("to call refusal 'first'"), HasSubstr("rank 1")))));
}

// The others may have all that they want of a call that a rank has left; else they find the refusal in place of the
// rest.
TEST_P(Groups, ACallThatARankLeavesEarlyIsRefusedAndTheNextOneMatches) {
  if (ranks().size < 2) return;
  for (const size_t bytes : {size_t{10}, 5 * kMailBytes / 2}) {
    std::latch left(1);
    run_ranks_well(ranks(), [&](Group& group) {
      const auto send = [&] { group.exchange("sizes", std::string(bytes, 'x')); };
      const std::string told = "cancelled: rank 0: interrupted in exchange 'sizes'";
      if (group.rank() == 0) {
        struct Stopped {};
        const device::WaitHook hook([](void*) { throw Stopped(); });
        EXPECT_THROW(send(), Stopped);
        left.count_down();
      } else {
        left.wait();
        if (bytes < kMailBytes) send();
        EXPECT_THAT(error_of([&] { bytes < kMailBytes ? group.barrier("next") : send(); }), HasSubstr(told));
      }
      EXPECT_EQ(group.refusals(), 1U);
      group.barrier("together");
      EXPECT_EQ(group.exchange("again", std::to_string(group.rank())).at(1), "1");
    });
  }
}

TEST_P(Groups, AWaitForAWordHearsARefusal) {
  if (ranks().size < 2) return;
  run_ranks_well(ranks(), [](Group& group) {
    for (int round = 0; round < 2; ++round) {
      if (group.rank() == 1) {
        group.refuse("step", {ErrorCode::kInvalidArgument, "a reason"});
      } else {
        const device::WaitHook hook([](void* waiting) { static_cast<Group*>(waiting)->hear_refusal(); }, &group);
        const auto word = group.at_least(1, Word::kPublished, 0, 1, "a version");
        EXPECT_EQ(error_of([&] { group.device().wait_host(*word, group.deadline()); }), "rank 1: a reason");
      }
      const auto latest = group.latest_refusal();
      ASSERT_TRUE(latest);
      EXPECT_EQ(latest->own, group.rank() == 1);
      EXPECT_EQ(latest->reason.message(), group.rank() == 1 ? "a reason" : "rank 1: a reason");
    }
    group.barrier("together");
    EXPECT_EQ(group.refusals(), 2U);
  });
}

TEST_P(Groups, RanksThatMakeDifferentCallsAreToldAndLive) {
  if (ranks().size < 2) return;
  run_ranks_well(ranks(), [](Group& group) {
    EXPECT_THAT(error_of([&] { group.rank() == 0 ? group.barrier("zero_ of w") : group.barrier("mul_ of w"); }),
                AllOf(HasSubstr("'zero_ of w'"), HasSubstr("'mul_ of w'"), HasSubstr("rank 0"), HasSubstr("rank ")));
    EXPECT_EQ(group.refusals(), 1U);
    group.barrier("together");
  });
}

TEST_P(Groups, ARankThatWaitsForAWordFindsThatAnotherMakesACall) {
  if (ranks().size < 2) return;
  run_ranks_well(ranks(), [](Group& group) {
    const auto retired = group.all_at_least(Word::kRetired, kWholeRank, 1, "to come to zero_ of w");
    const std::string told = error_of([&] {
      const device::WaitHook hook([](void*) {});
      group.rank() == 0 ? group.device().wait_host(*retired, group.deadline()) : group.barrier("a step");
    });
    EXPECT_THAT(told, AllOf(HasSubstr("calls barrier 'a step'"), HasSubstr("to come to zero_ of w")));
    group.barrier("together");
  });
}

// What a rank has refused last is why it has gone, wherever the others learn of it.
TEST_P(Groups, ARankThatDropsTheGroupAfterARefusalHasFailedByIt) {
  if (ranks().size < 2) return;
  const auto statuses = run_ranks(ranks(), [](Group& group) {
    if (group.rank() == 1) {
      group.refuse("wrap", {ErrorCode::kInvalidArgument, "13 rows cannot be cut"});
      throw Error(ErrorCode::kInvalidArgument, "13 rows cannot be cut");
    }
    group.device().wait_host(*group.at_least(1, Word::kPublished, 0, 1, "a version"), group.deadline());
  });
  for (size_t rank = 0; rank < statuses.size(); ++rank)
    EXPECT_EQ(statuses[rank].message(), rank == 1 ? "13 rows cannot be cut" : "rank 1: 13 rows cannot be cut");
  for (const Status& status : statuses) EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
}

TEST_P(Groups, TellsWhoLeft) {
  if (ranks().size < 2) return;
  const auto statuses = run_ranks(ranks(), [](Group& group) {
    if (group.rank() != 0)
      group.device().wait_host(*group.at_least(0, Word::kPublished, 0, 1, "a version"), group.deadline());
  });
  for (size_t rank = 1; rank < statuses.size(); ++rank)
    EXPECT_THAT(statuses[rank], message(AllOf(HasSubstr("rank 0"), HasSubstr("has left it"))));
}

// Also to a rank that waits already. Collectives go on.
TEST_P(Groups, TellsWhoseWordsAreFinal) {
  if (ranks().size < 2) return;
  const auto statuses = run_ranks(ranks(), [](Group& group) {
    if (group.rank() == 0) {
      group.set(Word::kPublished, 0, 1);
      group.finish();
    }
    group.barrier("still there");
    const int awaited = group.rank() == 0 ? 1 : 0;
    for (const uint64_t version : {1, 2})
      group.device().wait_host(*group.at_least(awaited, Word::kPublished, 0, version, "a version"), group.deadline());
  });
  EXPECT_THAT(statuses, Each(message(AllOf(HasSubstr("rank 0"), HasSubstr("has closed its runtime or ended")))));
}

// Whoever waits for its words learns why, not only that it has gone.
TEST_P(Groups, TellsWhyWhoRefusedACallHasGone) {
  if (ranks().size < 2) return;
  const auto statuses = run_ranks(ranks(), [](Group& group) {
    if (group.rank() == 1) {
      group.refuse("a backward", failed(ErrorCode::kInvalidArgument, "division by zero"_message));
      group.finish();
      return;
    }
    group.device().wait_host(*group.at_least(1, Word::kPublished, 0, 1, "a version"), group.deadline());
  });
  for (size_t rank = 0; rank < statuses.size(); ++rank) {
    if (rank == 1) continue;
    EXPECT_THAT(statuses[rank], message(HasSubstr("rank 1: division by zero")));
  }
}

TEST_P(Groups, TellsWhoDroppedIt) {
  if (ranks().size < 2) return;
  const auto statuses = run_ranks(ranks(), [](Group& group) {
    if (group.rank() == 1) throw std::runtime_error("a bug");
    group.barrier("never");
  });
  EXPECT_THAT(statuses[0], message(AllOf(HasSubstr("rank 1"), HasSubstr("has dropped group 'test'"))));
}

// Fails nothing: others may read on what it has shown. Who wants a call of it is told.
TEST_P(Groups, LeavesWithWhoDropsItOnceItsWordsAreFinal) {
  if (ranks().size < 2) return;
  const auto statuses = run_ranks(ranks(), [](Group& group) {
    if (group.rank() == 1) {
      group.finish();
      throw std::runtime_error("the end of a program");
    }
    group.barrier("never");
  });
  EXPECT_THAT(statuses[0], message(AllOf(HasSubstr("rank 1"), HasSubstr("has left it, and was wanted for barrier"))));
}

TEST_P(Groups, SaysWhomItWaitedFor) {
  if (ranks().size < 2) return;
  const TestRanks all = ranks();
  std::atomic<int> waited{0};
  run_ranks_well(all, [&](Group& group) {
    if (group.rank() == 1) {
      while (waited.load() < group.size() - 1) std::this_thread::yield();
      return group.set(Word::kPublished, 0, 7);
    }
    const auto condition = group.at_least(1, Word::kPublished, 0, 7, "version 7 of w");
    const std::string error =
        error_of([&] { group.device().wait_host(*condition, Deadline::after(std::chrono::milliseconds(20))); });
    EXPECT_THAT(error, AllOf(HasSubstr("deadline-exceeded"), HasSubstr("rank 1: published version 7 of w")));
    ++waited;
    group.device().wait_host(*condition, group.deadline());
  });
}

TEST_P(Groups, AWordMustNotGoBack) {
  run_ranks_well(ranks(), [](Group& group) {
    group.set(Word::kPublished, 0, 4);
    EXPECT_THAT(error_of([&] { group.set(Word::kPublished, 0, 3); }), HasSubstr("cannot go from 4 to 3"));
    EXPECT_THAT(error_of([&] { group.set(Word::kPublished, group.slots(), 3); }), HasSubstr("it has 64 slots"));
    EXPECT_THAT(error_of([&] { group.get(group.size(), Word::kPublished, 0); }), HasSubstr("rank"));
  });
}

TEST(VirtualGroups, DoAllThatOthersDo) {
  for (uint64_t seed = 0; seed < 30; ++seed)
    run_virtual_ranks(3, seed, [](Group& group) {
      const auto blobs = group.exchange("ranks", std::to_string(group.rank()));
      EXPECT_EQ(blobs, (std::vector<std::string>{"0", "1", "2"}));
      std::vector<float> values{static_cast<float>(group.rank())};
      group.max_exchange(values);
      EXPECT_EQ(values[0], 2);
      const auto stream = group.device().make_stream({.name = "words"});
      const int next = (group.rank() + 1) % 3;
      stream->enqueue({.name = "wait", .after = {group.at_least(next, Word::kPublished, 1, 9, "version 9")}});
      group.set(Word::kPublished, 1, 9);
      stream->synchronize(group.deadline());
    });
}

TEST(VirtualGroups, LearnOfRefusalsInAnyOrder) {
  for (uint64_t seed = 0; seed < 60; ++seed)
    run_virtual_ranks(3, seed, [seed](Group& group) {
      for (uint64_t call = 0; call < 6; ++call) {
        const auto refuser = static_cast<int>((seed + call * call) % 4);  // 3: nobody
        if (group.rank() == refuser) {
          group.refuse("", {ErrorCode::kNotFound, std::to_string(call)});
        } else if (refuser == 3) {
          group.exchange("agreed", std::string(kMailBytes + call, 'x'));
        } else {
          EXPECT_EQ(error_of([&] { group.exchange("refused", std::string(kMailBytes + 1, 'x')); }),
                    fmt::format("not-found: rank {}: {}", refuser, call));
        }
      }
      group.barrier("all came through");
    });
}

TEST(VirtualGroups, ADeadlockSaysWhatIsMissing) {
  EXPECT_THAT(error_of([] {
                run_virtual_ranks(2, 1, [](Group& group) {
                  group.device().wait_host(*group.at_least(1 - group.rank(), Word::kPublished, 0, 1, "version 1 of w"),
                                           group.deadline());
                });
              }),
              AllOf(HasSubstr("rank 1: published version 1 of w"), HasSubstr("rank 0: published version 1 of w")));
}

TEST(Formation, RefusesRanksThatDisagree) {
  TestRanks ranks{.size = 3};
  ranks.change = [](GroupOptions& options) { options.slots = options.rank == 2 ? 65 : 64; };
  const auto statuses = run_ranks(ranks, [](Group&) {});
  EXPECT_THAT(
      statuses,
      Each(message(AllOf(HasSubstr("rank 0"), HasSubstr("64 slots"), HasSubstr("rank 2"), HasSubstr("65 slots")))));
}

TEST(Formation, RefusesRanksOfOtherHosts) {
  device::CpuDevice device(device::DeviceOptions{});
  const Exchange other_host = [](const std::string& own) {
    auto other = read_message<Bootstrap>(std::as_bytes(std::span(own)), "own");
    other.rank = 1;
    other.process.boot_id = "another";
    other.host = "far.example";
    const auto bytes = message_bytes(other);
    return std::vector<std::string>{own, {reinterpret_cast<const char*>(bytes.data()), bytes.size()}};
  };
  EXPECT_THAT(error_of([&] {
                Group::form(other_host, {.rank = 0, .size = 2, .device = &device, .slots = 1, .in_process = true});
              }),
              AllOf(HasSubstr("different hosts"), HasSubstr("far.example")));
}

TEST(Formation, TellsWhichBlobIsNone) {
  device::CpuDevice device(device::DeviceOptions{});
  const auto form = [&](const Exchange& exchange) {
    return error_of(
        [&] { Group::form(exchange, {.rank = 0, .size = 2, .device = &device, .slots = 1, .in_process = true}); });
  };
  EXPECT_THAT(form([](const std::string& own) { return std::vector<std::string>{own}; }),
              HasSubstr("returned 1 blobs"));
  EXPECT_THAT(form([](const std::string& own) { return std::vector<std::string>{own, "noise"}; }),
              HasSubstr("blob of rank 1"));
  EXPECT_THAT(form([](const std::string& own) { return std::vector<std::string>{own, own}; }),
              HasSubstr("comes from rank 0"));
  EXPECT_THAT(form([](const std::string& own) { return std::vector<std::string>{own, std::string(5000, 'x')}; }),
              HasSubstr("5000 bytes"));
}

TEST(Formation, RefusesWhatItCannotDo) {
  device::CpuDevice device(device::DeviceOptions{});
  const auto form = [](const GroupOptions& options) {
    return error_of([&] { Group::form([](const std::string& own) { return std::vector{own}; }, options); });
  };
  EXPECT_THAT(form({.rank = 1, .size = 1, .device = &device}), HasSubstr("rank 1 of 1"));
  EXPECT_THAT(form({.size = 1, .device = &device, .slots = 0}), HasSubstr("0 slots"));
  EXPECT_THAT(form({.size = 1}), HasSubstr("needs a device"));
  EXPECT_THAT(form({.size = 1, .device = &device, .backend = Backend::kNccl}), HasSubstr("collective/nccl/"));
  EXPECT_FALSE(traits_of(Backend::kPulls).needs_matched_order);
}

TEST(Bootstraps, GoThroughAStore) {
  const TestRuntimeFolder folder;
  const auto server = serve_store("tcp://127.0.0.1:0");
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 3; ++rank)
    ranks.push_back(start_thread("rank", [&, rank] {
      const auto store = open_store(server->address());
      device::CpuDevice device({.rank = rank});
      const auto exchange = store_exchange(*store, "job/group", rank, 3, std::chrono::seconds(60));
      const auto group = Group::form(exchange, {.rank = rank, .size = 3, .device = &device, .slots = 8});
      EXPECT_EQ(group->exchange("ranks", std::to_string(rank)), (std::vector<std::string>{"0", "1", "2"}));
      group->close(soon());
    }));
  for (std::thread& rank : ranks) rank.join();
}

TEST(Bootstraps, SayWhoDidNotCome) {
  const TestRuntimeFolder folder;
  const auto server = serve_store("tcp://127.0.0.1:0");
  const auto store = open_store(server->address());
  const auto through_store = store_exchange(*store, "job/group", 1, 3, std::chrono::milliseconds(50));
  EXPECT_THAT(error_of([&] { through_store("me"); }), HasSubstr("no blob of rank(s) 0, 2"));
  device::CpuDevice device(device::DeviceOptions{});
  InProcessExchange in_process(2);
  EXPECT_THAT(error_of([&] { in_process.of_rank(0, device, std::chrono::milliseconds(20))("me"); }),
              HasSubstr("rank(s) 1 have not come"));
}

TEST(Bootstraps, EndAtAStop) {
  const TestRuntimeFolder folder;
  const auto server = serve_store("tcp://127.0.0.1:0");
  const auto store = open_store(server->address());
  std::stop_source stop;
  const auto exchange = store_exchange(*store, "job/group", 1, 3, std::chrono::minutes(1), stop.get_token());
  std::thread other = start_thread("stop", [&] {
    store->wait_for("job/group", [](const StoreView& keys) { return !keys.empty(); }, std::chrono::minutes(1));
    stop.request_stop();
  });
  EXPECT_THAT(error_of([&] { exchange("me"); }), HasSubstr("cancelled: "));
  other.join();
}

TEST(GroupMessages, ReadAsTheyWereWritten) {
  expect_fields_hold<GroupHello>();
  expect_fields_hold<AskArena>();
  expect_fields_hold<ArenaAnswer>();
  const Bootstrap bootstrap{.rank = 1,
                            .size = 2,
                            .slots = 3,
                            .name = "g",
                            .host = "h",
                            .process = Incarnation::self(),
                            .key = 4,
                            .socket = "/s"};
  expect_exact(bootstrap);
}

}  // namespace
}  // namespace tessera::collective
