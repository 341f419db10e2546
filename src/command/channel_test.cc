// CommandClient and CommandServer together.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <map>
#include <optional>
#include <string>

#include "base/message.h"
#include "base/mutex.h"
#include "base/socket.h"
#include "base/testing.h"
#include "base/thread.h"
#include "command/client.h"
#include "command/server.h"

namespace tessera {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

constexpr uint64_t kIncarnation = 42;
enum Type : uint16_t { kEcho = 1, kHold = 2, kThrow = 3, kDrop = 4, kRefuse = 5, kTooMuch = 6 };

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}
std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Values that one thread waits for and another sets.
class Board {
 public:
  template <typename Change>
  void change(Change change) {
    const MutexLock lock(mutex_);
    change();
    changed_.notify_all();
  }
  template <typename Holds>
  bool await(Holds holds) {
    const MutexLock lock(mutex_);
    return changed_.wait_until(mutex_, Deadline::after(std::chrono::seconds(60)), holds);
  }

 private:
  Mutex mutex_;
  CondVar changed_;
};

class CommandChannel : public testing::Test {
 protected:
  // A separate queue for each connection; the log stays.
  void connect(CommandMemory::Slots slots = {}) {
    const uint64_t first_id = client_ ? client_->next_id() : 1;
    server_.reset();
    memory_ = CommandMemory::create(kIncarnation, slots);
    ended_.reset();
    server_.emplace(
        CommandMemory::open(duplicate_fd(memory_->fd()), "trainer/0"), log_, "trainer/0",
        [this](const Command& command, Replier& replier) { handle(command, replier); },
        [this](const Status& status) { board_.change([&] { ended_ = status; }); });
    client_.emplace(memory_, "agent of trainer/0", first_id);
  }
  CommandChannel() { connect(); }

  void handle(const Command& command, Replier& replier) {
    board_.change([&] { ++executed_[command.id]; });
    switch (command.type) {
      case kEcho:
        return replier.succeed(command.payload);
      case kHold:
        return board_.change([&] { held_.emplace(command.id, std::move(replier)); });
      case kThrow:
        fail(ErrorCode::kNotFound, "no batch {}"_message, text_of(command.payload));
      case kDrop:
        return;
      case kRefuse:
        return replier.fail(Status(ErrorCode::kMismatch, "not like that"));
      default:
        return replier.succeed(std::vector<std::byte>(kMaxRecordPayload + 1));
    }
  }
  void answer(uint64_t id, const std::string& text) {
    ASSERT_TRUE(board_.await([&] { return held_.contains(id); }));
    decltype(held_)::node_type held;
    board_.change([&] { held = held_.extract(id); });
    held.mapped().succeed(bytes_of(text));
  }
  int executions_of(uint64_t id) {
    int count = 0;
    board_.change([&] { count = executed_[id]; });
    return count;
  }
  size_t executed() {
    size_t count = 0;
    board_.change([&] { count = executed_.size(); });
    return count;
  }
  std::string call(uint16_t type, const std::string& payload) {
    return text_of(client_->call(type, bytes_of(payload), soon()));
  }
  CommandCall post(uint16_t type, const std::string& payload = "") {
    return client_->post(type, bytes_of(payload), soon());
  }
  Status why_ended() {
    EXPECT_TRUE(board_.await([&] { return ended_.has_value(); }));
    return ended_.value_or(Status());
  }

  Board board_;
  std::map<uint64_t, int> executed_;
  std::map<uint64_t, Replier> held_;
  std::optional<Status> ended_;
  std::shared_ptr<CommandLog> log_ = std::make_shared<CommandLog>(kIncarnation);
  std::shared_ptr<CommandMemory> memory_;
  std::optional<CommandServer> server_;
  std::optional<CommandClient> client_;
};

std::string outcome_of(CommandCall& call) {
  std::string result;
  const std::string error = error_of([&] { result = text_of(call.wait(soon())); });
  return error == "(no error)" ? result : error;
}

TEST_F(CommandChannel, ACommandEndsWithItsResultOrWithWhatTheAgentSays) {
  EXPECT_EQ(call(kEcho, "hello"), "hello");
  EXPECT_EQ(call(kEcho, ""), "");
  EXPECT_EQ(call(kEcho, std::string(kMaxRecordPayload, 'x')), std::string(kMaxRecordPayload, 'x'));
  EXPECT_EQ(error_of([&] { call(kThrow, "policy"); }), "not-found: no batch policy");
  EXPECT_EQ(error_of([&] { call(kRefuse, ""); }), "mismatch: not like that");
  EXPECT_EQ(error_of([&] { call(kDrop, ""); }), "internal: the agent has dropped the command");
  EXPECT_THAT(error_of([&] { call(kTooMuch, ""); }), HasSubstr("a result of 993 bytes, where 992 fit"));
}

TEST_F(CommandChannel, CommandsEndInTheOrderOfTheirAnswers) {
  CommandCall slow = post(kHold);
  CommandCall slower = post(kHold);
  EXPECT_EQ(call(kEcho, "quick"), "quick");
  EXPECT_FALSE(slow.done());
  answer(slower.id(), "second");
  EXPECT_EQ(outcome_of(slower), "second");
  answer(slow.id(), "first");
  EXPECT_EQ(outcome_of(slow), "first");
  EXPECT_THAT(outcome_of(slow), HasSubstr("its outcome was taken before"));
}

TEST_F(CommandChannel, AnOutcomeCanBePolled) {
  CommandCall call = post(kHold);
  EXPECT_FALSE(call.done());
  answer(call.id(), "done");
  EXPECT_TRUE(call.done());
  EXPECT_TRUE(call.done());
  EXPECT_EQ(text_of(call.wait(Deadline::at(TimePoint::min()))), "done");
}

TEST_F(CommandChannel, EachOfManyThreadsGetsItsOwnOutcomes) {
  constexpr int kThreads = 6, kCalls = 400;
  connect({.commands = 2, .replies = 4});  // so that threads also have to wait for room
  std::atomic<int> right{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.push_back(start_thread("caller", [&, t] {
      for (int i = 0; i < kCalls; ++i) {
        const std::string text = std::to_string(t) + "." + std::to_string(i);
        if (call(kEcho, text) == text) ++right;
      }
    }));
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, kThreads * kCalls);
  EXPECT_EQ(executed(), size_t{kThreads * kCalls});
}

// The leading thread gets the other's outcome first, and the other leads once the first has its own.
TEST_F(CommandChannel, AThreadThatWaitsServesTheOthers) {
  CommandCall a = post(kHold);
  CommandCall b = post(kHold);
  CommandCall c = post(kHold);
  std::vector<std::string> outcomes(3);
  std::vector<std::thread> threads;
  int at = 0;
  for (CommandCall* call : {&a, &b, &c})
    threads.push_back(start_thread(
        "caller", [call, &outcome = outcomes[static_cast<size_t>(at++)]] { outcome = outcome_of(*call); }));
  answer(b.id(), "b");
  threads[1].join();
  answer(a.id(), "a");
  threads[0].join();
  answer(c.id(), "c");
  threads[2].join();
  EXPECT_THAT(outcomes, testing::ElementsAre("a", "b", "c"));
}

TEST_F(CommandChannel, AWaitThatEndsAtItsDeadlineCanBeTakenUpAgain) {
  CommandCall call = post(kHold);
  EXPECT_THAT(error_of([&] { call.wait(Deadline::after(std::chrono::milliseconds(1))); }),
              AllOf(StartsWith("deadline-exceeded: command 1 to agent of trainer/0"), HasSubstr("it goes on")));
  answer(call.id(), "late");
  EXPECT_EQ(outcome_of(call), "late");
}

TEST_F(CommandChannel, ACancelledWaitLosesNothingOfTheOthers) {
  CommandCall a = post(kHold);
  CommandCall b = post(kHold);
  for (int round = 0; round < 50; ++round) {  // with luck, each of the two leads in some rounds
    std::string cancelled;
    std::thread waiter = start_thread("caller", [&] { cancelled = outcome_of(a); });
    a.cancel();
    waiter.join();
    ASSERT_THAT(cancelled, StartsWith("cancelled: command 1 to agent of trainer/0"));
  }
  std::string outcome;
  std::thread waiter = start_thread("caller", [&] { outcome = outcome_of(b); });
  std::thread other = start_thread("caller", [&] { outcome_of(a); });
  a.cancel();
  other.join();
  answer(b.id(), "b");
  waiter.join();
  EXPECT_EQ(outcome, "b");
  answer(a.id(), "a");
  EXPECT_EQ(outcome_of(a), "a");
}

TEST_F(CommandChannel, AnOutcomeThatNobodyWantsIsDropped) {
  connect({.commands = 4, .replies = 2});
  for (int i = 0; i < 10; ++i) {
    const uint64_t id = post(kHold).id();
    answer(id, "unwanted");
  }
  EXPECT_EQ(call(kEcho, "wanted"), "wanted");
}

TEST_F(CommandChannel, CommandsOnTheirWayAreBounded) {
  connect({.commands = 8, .replies = 2});
  CommandCall a = post(kHold);
  CommandCall b = post(kHold);
  EXPECT_THAT(error_of([&] { client_->post(kEcho, {}, Deadline::after(std::chrono::milliseconds(1))); }),
              AllOf(StartsWith("deadline-exceeded: agent of trainer/0"), HasSubstr("2 are on their way")));
  answer(a.id(), "a");
  CommandCall c = post(kEcho, "c");  // waits for room, and so receives a's outcome
  EXPECT_EQ(outcome_of(c), "c");
  EXPECT_EQ(outcome_of(a), "a");
  answer(b.id(), "b");
  EXPECT_EQ(outcome_of(b), "b");
}

TEST_F(CommandChannel, AnAgentThatIsBusyIsWaitedFor) {
  connect({.commands = 1, .replies = 8});
  server_.reset();  // nobody takes commands any more
  const auto memory = CommandMemory::create(kIncarnation, {.commands = 1, .replies = 8});
  CommandClient client(memory, "agent of trainer/0");
  CommandCall first = client.post(kEcho, {}, soon());
  EXPECT_THAT(error_of([&] { client.post(kEcho, {}, Deadline::after(std::chrono::milliseconds(1))); }),
              AllOf(StartsWith("deadline-exceeded"), HasSubstr("the agent has not taken the last 1")));
  std::string outcome;
  std::thread poster =
      start_thread("caller", [&] { outcome = text_of(client.call(kEcho, bytes_of("second"), soon())); });
  CommandServer server(CommandMemory::open(duplicate_fd(memory->fd()), "trainer/0"), log_, "trainer/0",
                       [this](const Command& command, Replier& replier) { handle(command, replier); });
  poster.join();
  EXPECT_EQ(outcome, "second");
  EXPECT_EQ(outcome_of(first), "");
}

// While a handler is busy, the next commands wait.
TEST_F(CommandChannel, WhatWaitsCanBeSeen) {
  Board gate;
  bool open = false, at_work = false;
  const auto memory = CommandMemory::create(kIncarnation);
  CommandClient client(memory, "agent of trainer/0");
  CommandServer server(CommandMemory::open(duplicate_fd(memory->fd()), "trainer/0"), log_, "trainer/0",
                       [&](const Command&, Replier& replier) {
                         gate.change([&] { at_work = true; });
                         gate.await([&] { return open; });
                         replier.succeed();
                       });
  CommandCall first = client.post(kEcho, {}, soon());
  ASSERT_TRUE(gate.await([&] { return at_work; }));
  CommandCall second = client.post(kHold, bytes_of("abc"), soon());
  const auto pending = server.commands().pending();
  ASSERT_EQ(pending.size(), 1u);
  EXPECT_EQ(server.commands().size(), 1u);
  EXPECT_EQ(pending[0].head.id, second.id());
  EXPECT_EQ(pending[0].head.incarnation, kIncarnation);
  EXPECT_EQ(pending[0].head.type, kHold);
  EXPECT_EQ(pending[0].bytes, 3u);
  gate.change([&] { open = true; });
  EXPECT_EQ(outcome_of(second), "");
}

TEST_F(CommandChannel, AnAgentThatClosesLeavesOutcomesUnknownButForThoseItGave) {
  CommandCall given = post(kHold);
  CommandCall open = post(kHold);
  answer(given.id(), "given");
  server_.reset();
  EXPECT_EQ(outcome_of(given), "given");
  EXPECT_EQ(outcome_of(open),
            "peer-lost: command 2 to agent of trainer/0: agent lost, outcome unknown: the agent has closed it");
  EXPECT_EQ(error_of([&] { post(kEcho); }),
            "peer-lost: agent of trainer/0: the command queue has ended: the agent has closed it");
  EXPECT_EQ(client_->status().code(), ErrorCode::kPeerLost);
}

// What a watcher of the agent's pidfd does: every waiting thread ends its wait, including those that wait for room.
TEST_F(CommandChannel, AnAgentThatDiesEndsEveryWait) {
  connect({.commands = 2, .replies = 2});
  CommandCall a = post(kHold);
  CommandCall b = post(kHold);
  std::vector<std::string> outcomes(3);
  std::vector<std::thread> threads;
  threads.push_back(start_thread("caller", [&] { outcomes[0] = outcome_of(a); }));
  threads.push_back(start_thread("caller", [&] { outcomes[1] = outcome_of(b); }));
  threads.push_back(start_thread("caller", [&] { outcomes[2] = error_of([&] { post(kEcho); }); }));
  client_->close(Status(ErrorCode::kPeerLost, "pid 77 has died"));
  client_->close(Status(ErrorCode::kCancelled, "too late"));
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(outcomes[0], "peer-lost: command 1 to agent of trainer/0: agent lost, outcome unknown: pid 77 has died");
  EXPECT_EQ(outcomes[1], "peer-lost: command 2 to agent of trainer/0: agent lost, outcome unknown: pid 77 has died");
  EXPECT_EQ(outcomes[2], "peer-lost: agent of trainer/0: the command queue has ended: pid 77 has died");
  EXPECT_EQ(client_->status().message(), "pid 77 has died");
}

TEST_F(CommandChannel, AClientThatClosesHasItsCommandsExecuted) {
  for (int i = 0; i < 20; ++i) post(kEcho);
  client_.reset();
  EXPECT_TRUE(why_ended().ok());
  EXPECT_EQ(executed(), 20u);
}

TEST_F(CommandChannel, AClientThatDiesEndsTheServer) {
  server_->close(Status(ErrorCode::kPeerLost, "pid 78 has died"));
  EXPECT_EQ(why_ended().message(), "the command queue of trainer/0 has ended: pid 78 has died");
}

TEST_F(CommandChannel, ARepeatedCommandIsExecutedOnceAndAnsweredAsBefore) {
  EXPECT_EQ(call(kEcho, "one"), "one");
  CommandCall held = post(kHold);
  ASSERT_TRUE(board_.await([&] { return held_.contains(2); }));
  EXPECT_THAT(error_of([&] { client_->repeat(held.id(), kHold, {}, soon()); }), StartsWith("already-exists"));
  client_->close(Status(ErrorCode::kCancelled, "a new queue"));
  EXPECT_THAT(outcome_of(held), HasSubstr("outcome unknown"));

  connect();
  CommandCall again = client_->repeat(2, kHold, {}, soon());
  CommandCall known = client_->repeat(1, kEcho, bytes_of("another payload"), soon());
  EXPECT_EQ(outcome_of(known), "one");
  answer(2, "two");  // it was running all the while
  EXPECT_EQ(outcome_of(again), "two");
  EXPECT_EQ(executions_of(1), 1);
  EXPECT_EQ(executions_of(2), 1);
  EXPECT_EQ(post(kEcho).id(), 3u);
}

TEST_F(CommandChannel, AnAnswerThatComesAfterTheServerIsKeptForTheNextQueue) {
  CommandCall call = post(kHold);
  ASSERT_TRUE(board_.await([&] { return held_.contains(1); }));
  server_.reset();
  answer(1, "kept");
  EXPECT_THAT(outcome_of(call), HasSubstr("outcome unknown"));
  connect();
  CommandCall again = client_->repeat(1, kHold, {}, soon());
  EXPECT_EQ(outcome_of(again), "kept");
  EXPECT_EQ(executions_of(1), 1);
}

TEST_F(CommandChannel, AClientThatBreaksTheRulesLosesItsQueue) {
  struct Case {
    const char* error;
    std::function<void(CommandProducer&, CommandMemory&)> crime;
  };
  const Case cases[] = {
      {"of another incarnation", [](auto& commands, auto&) { commands.push({.incarnation = 1, .id = 1}, {}, soon()); }},
      {"more than 2 commands are on their way",
       [](auto& commands, auto&) {
         for (uint64_t id = 1; id <= 3; ++id)
           commands.push({.incarnation = kIncarnation, .id = 1000 + id, .type = kHold}, {}, soon());
       }},
      {"data that no client writes",
       [](auto&, auto& memory) {
         memory.commands().slots[0].words[3] = uint64_t{0xFFFF} << 16;
         memory.commands().header->producer.count = 1;
         memory.commands().header->consumer.asleep = 0;
         futex_wake(memory.commands().header->consumer.asleep);
       }},
      {"no room for replies", [](auto& commands, auto&) {
         for (uint64_t id = 1; id <= 3; ++id)
           commands.push({.incarnation = kIncarnation, .id = 2000 + id, .type = kEcho}, {}, soon());
       }}};
  for (const Case& c : cases) {
    connect({.commands = 4, .replies = 2});
    CommandProducer commands(memory_->commands(), {});
    c.crime(commands, *memory_);
    const Status why = why_ended();
    EXPECT_EQ(why.code(), ErrorCode::kDataLoss) << c.error;
    EXPECT_THAT(why.message(), AllOf(StartsWith("the command queue of trainer/0"), HasSubstr(c.error)));
  }
}

TEST_F(CommandChannel, AnAgentThatBreaksTheRulesLosesItsQueue) {
  struct Case {
    const char* error;
    RecordHead reply;
  };
  const Case cases[] = {{"a reply to command 9", {.incarnation = kIncarnation, .id = 9, .type = 1}},
                        {"a reply to command 1", {.incarnation = 1, .id = 1, .type = 1}},
                        {"a reply of type 7", {.incarnation = kIncarnation, .id = 1, .type = 7}}};
  for (const Case& c : cases) {
    const auto memory = CommandMemory::create(kIncarnation);
    CommandClient client(memory, "agent of trainer/0");
    CommandCall call = client.post(kEcho, {}, soon());
    CommandProducer replies(memory->replies(), {});
    ASSERT_EQ(replies.try_push(c.reply, {}), RingState::kReady);
    EXPECT_THAT(outcome_of(call),
                AllOf(StartsWith("data-loss: command 1"), HasSubstr("outcome unknown"), HasSubstr(c.error)));
    EXPECT_THAT(error_of([&] { client.post(kEcho, {}, soon()); }), StartsWith("data-loss"));
  }
}

TEST_F(CommandChannel, TheLogAndTheMemoryAreOfOneIncarnation) {
  EXPECT_THAT(error_of([&] {
                CommandServer(memory_, std::make_shared<CommandLog>(1), "trainer/0", [](const Command&, Replier&) {});
              }),
              HasSubstr("000000000000002a, the log of 0000000000000001"));
}

TEST_F(CommandChannel, AForkedChildIsToldAndHarmsNothing) {
  CommandCall call = post(kHold);
  const pid_t child = ::fork();
  if (child == 0) {
    const bool told = error_of([&] { post(kEcho); }).find("forked child") != std::string::npos &&
                      error_of([&] { call.wait(soon()); }).find("forked child") != std::string::npos;
    {
      const CommandCall taken = std::move(call);
    }
    client_.reset();
    ::_exit(told ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  answer(1, "still here");
  EXPECT_EQ(outcome_of(call), "still here");
}

}  // namespace
}  // namespace tessera
