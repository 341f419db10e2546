#include "device/record/recorder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <thread>

#include "device/cpu_device.h"
#include "device/testing.h"

namespace tessera::device {
namespace {

using testing::ElementsAre;

// Keeps all blocks.
struct Kept {
  RecordLog log;
  RecordSink sink() {
    return [this](std::unique_ptr<RecordBlock> block) {
      log.push_back(std::move(*block));
      return nullptr;
    };
  }
  // Without times, whose place in the log is a matter of time.
  std::vector<Record> records() const {
    std::vector<Record> all;
    for (const RecordBlock& block : log)
      std::ranges::remove_copy(block.records(), std::back_inserter(all), RecordKind::kRan, &Record::kind);
    return all;
  }
  std::vector<Record> times() const {
    std::vector<Record> all;
    for (const RecordBlock& block : log)
      std::ranges::copy_if(block.records(), std::back_inserter(all),
                           [](const Record& record) { return record.kind == RecordKind::kRan; });
    return all;
  }
  std::vector<std::string> texts() const {
    std::vector<std::string> all;
    for (const Record& record : records()) all.push_back(to_string(record));
    return all;
  }
};

TEST(RecordBlock, KeepsWhatARecordPointsTo) {
  RecordBlock block;
  block.begin(3, 9);
  const RecordedAccess access{.region = {.owner = 1, .number = 2}, .offset = 64, .bytes = 32};
  const WordEdge words[] = {{.rank = 1, .word = 5, .value = 7}, {.rank = 2, .word = 5, .value = 8}};
  {
    const std::string subject = "wte.weight", name = "a name that is no literal";
    RecordBlock::Entry* const entry = block.add(RecordKind::kOperation, {}, subject, 1, 2);
    ASSERT_NE(entry, nullptr);
    entry->actor = 4;
    entry->count = 2;
    entry->number = 8;
    entry->name = "gather";
    *entry->accesses() = access;
    std::ranges::copy(words, entry->words());
    block.add(RecordKind::kActor, name, {}, 0, 0)->actor = 5;
  }
  const RecordBlock moved = std::move(block);
  EXPECT_EQ(moved.size(), 2u);
  auto record = moved.records().begin();
  EXPECT_EQ(to_string(*record), "rank 3, stream 4: operation 8 gather wte.weight");
  EXPECT_THAT((*record).accesses, ElementsAre(access));
  EXPECT_THAT((*record).words, ElementsAre(words[0], words[1]));
  EXPECT_EQ((*record).waits, 2u);
  EXPECT_EQ((*record).sequence, 9u);
  ++record;
  EXPECT_EQ(to_string(*record), "rank 3, stream 5: actor a name that is no literal");
  EXPECT_EQ((*record).sequence, 10u);
  EXPECT_EQ(++record, moved.records().end());
}

TEST(RecordBlock, IsFullWhenARecordDoesNotFit) {
  constexpr size_t kMany = 100;
  RecordBlock block(RecordBlock::bytes_for({}, "x", kMany, 0) + RecordBlock::bytes_for({}, {}, 0, 0));
  const auto add = [&](std::string_view subject, size_t accesses) {
    return block.add(RecordKind::kHostAccess, {}, subject, accesses, 0) != nullptr;
  };
  EXPECT_TRUE(add("x", kMany));
  EXPECT_FALSE(add("y", 0));
  EXPECT_TRUE(add({}, 0));
  EXPECT_FALSE(add({}, 0));
  EXPECT_EQ(block.size(), 2u);
  block.begin(0, 1);
  EXPECT_TRUE(block.empty());
  EXPECT_TRUE(block.records().empty());
  EXPECT_TRUE(add("x", kMany));
}

TEST(RecordBlock, TellsTicksAsTimes) {
  RecordBlock block;
  RecordBlock::Entry* const entry = block.add(RecordKind::kRan, {}, {}, 0, 0);
  entry->number = 1;
  entry->begin = 1000;
  entry->end = 1500;
  block.set_scale(
      {{.ticks = 0, .time = TimePoint(Duration(7000))}, {.ticks = 2000, .time = TimePoint(Duration(8000))}});
  const Record ran = *block.records().begin();
  EXPECT_EQ(ran.operation, 1u);
  EXPECT_EQ(ran.begin, 7500);
  EXPECT_EQ(ran.end, 7750);
}

TEST(Recorder, RecordsAStepOfARank) {
  CpuDevice device({.rank = 2});
  Recorder& recorder = device.recorder();
  const auto stream = device.make_stream({.name = "gather"});
  std::vector<std::byte> arena(1024), own(64);
  recorder.add_region(arena.data(), arena.size(), {.owner = 1, .number = 3}, "arena 3 of rank 1");
  Kept kept;
  recorder.start(kept.sink());
  TestWord word;
  word.set(7);
  stream->enqueue({.name = "gather",
                   .subject = "w",
                   .accesses = {read_of(arena.data() + 128, 64, 7), write_of(own.data(), 64)},
                   .after = {word.reaches(7, "rank 1 to publish version 7", {.rank = 1, .word = 4, .value = 7})},
                   .body = [] {},
                   .writes = {{.rank = 2, .word = 9, .value = 1}}});
  const Event event = stream->record();
  device.wait_host(event, soon());
  device.caller()->enqueue({.name = "gemm", .accesses = {read_of(own.data(), 64)}});
  recorder.word_write(std::vector<WordEdge>{{.rank = 2, .word = 10, .value = 3}}, "retire");
  recorder.collective("etp", 4, 12, "max");
  recorder.stop();

  std::vector<Record> records = kept.records();
  EXPECT_EQ(records.size(), 9u);
  // The stream records the end of its wait when it likes.
  const auto waited = std::ranges::find(records, RecordKind::kWordWait, &Record::kind);
  ASSERT_NE(waited, records.end());
  EXPECT_EQ(waited->operation, 1u);
  EXPECT_EQ(waited->actor, stream->actor());
  EXPECT_THAT(waited->words, ElementsAre(WordEdge{.rank = 1, .word = 4, .value = 7}));
  records.erase(waited);
  std::vector<std::string> texts;
  for (const Record& record : records) texts.push_back(to_string(record));
  EXPECT_THAT(texts, ElementsAre("rank 2, stream 1: actor gather", "rank 2, host: region arena 3 of rank 1",
                                 "rank 2, stream 1: operation 1 gather w", "rank 2, stream 1: event record 1",
                                 "rank 2, host: event wait 1", "rank 2, host: operation gemm",
                                 "rank 2, host: word write retire", "rank 2, host: collective 12 max etp"));
  const RegionId region{.owner = 1, .number = 3};
  EXPECT_THAT(
      records[2].accesses,
      ElementsAre(
          RecordedAccess{.region = region, .offset = 128, .bytes = 64, .version = 7},
          RecordedAccess{
              .region = {.owner = 2}, .offset = reinterpret_cast<uintptr_t>(own.data()), .bytes = 64, .write = true}));
  EXPECT_THAT(records[2].words, ElementsAre(WordEdge{.rank = 2, .word = 9, .value = 1}));
  EXPECT_EQ(records[2].waits, 1u);
  EXPECT_EQ(records[7].ranks, 4u);
  const std::vector<Record> times = kept.times();
  ASSERT_EQ(times.size(), 2u);
  EXPECT_EQ(to_string(times[0]), "rank 2, stream 1: ran 1");
  EXPECT_EQ(to_string(times[1]), "rank 2, host: ran");
  for (const Record& ran : times) EXPECT_LE(ran.begin, ran.end);
  EXPECT_LE(times[0].end, times[1].begin);
}

TEST(Recorder, OffItKeepsOnlyStreamsAndRegions) {
  Recorder recorder(1);
  EXPECT_EQ(recorder.add_actor("before"), 1u);
  const int here = 0, there = 0;
  recorder.add_region(&here, sizeof here, {.owner = 1, .number = 1}, "here");
  recorder.add_region(&there, sizeof there, {.owner = 1, .number = 2}, "there");
  recorder.drop_region(&there);
  recorder.host_access("lost", "", {});
  Kept kept;
  recorder.start(kept.sink());
  EXPECT_EQ(error_of([&] { recorder.start(kept.sink()); }),
            "already-exists: rank 1 records its schedule already: stop that first");
  recorder.host_access("kept", "", {});
  EXPECT_EQ(recorder.add_actor("later"), 2u);
  recorder.drop_region(&here);
  recorder.stop();
  recorder.stop();
  recorder.host_access("lost", "", {});
  EXPECT_THAT(kept.texts(), ElementsAre("rank 1, stream 1: actor before", "rank 1, host: region here",
                                        "rank 1, host: host access kept", "rank 1, stream 2: actor later",
                                        "rank 1, host: region end"));
}

TEST(Recorder, NumbersRecordsOverManyBlocksAndThreads) {
  constexpr uint64_t kThreads = 4, kEach = 3000;
  Recorder recorder;
  uint64_t next = 1, blocks = 0;
  std::unique_ptr<RecordBlock> spare;
  recorder.start([&](std::unique_ptr<RecordBlock> block) {
    ++blocks;
    for (const Record& record : block->records()) EXPECT_EQ(record.sequence, next++);
    return block;  // used again
  });
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < kThreads; ++t)
    threads.emplace_back([&recorder, t] {
      const WordEdge edge{.rank = static_cast<int>(t), .word = t, .value = t};
      for (uint64_t i = 1; i <= kEach; ++i) recorder.word_wait(1, i, {&edge, 1});
    });
  for (std::thread& thread : threads) thread.join();
  recorder.stop();
  EXPECT_EQ(next, kThreads * kEach + 1);
  EXPECT_GT(blocks, kThreads * kEach * sizeof(RecordBlock::Entry) / RecordBlock::kBytes);
}

TEST(Recorder, AccessesKnowTheirRegion) {
  Recorder recorder(5);
  alignas(64) static std::byte memory[300];
  recorder.add_region(memory + 200, 100, {.owner = 1, .number = 2}, "second");
  recorder.add_region(memory, 100, {.owner = 0, .number = 1}, "first");
  Kept kept;
  recorder.start(kept.sink());
  const std::vector<Access> accesses{read_of(memory, 1), read_of(memory + 99, 1), read_of(memory + 100, 1),
                                     read_of(memory + 200, 1), read_of(memory + 299, 1)};
  recorder.host_access("all", "", accesses);
  recorder.stop();
  std::vector<std::pair<RegionId, uint64_t>> places;
  const auto records = kept.records();
  for (const RecordedAccess& access : records.back().accesses) places.emplace_back(access.region, access.offset);
  const RegionId first{.owner = 0, .number = 1}, second{.owner = 1, .number = 2}, own{.owner = 5};
  EXPECT_THAT(places, ElementsAre(std::pair(first, 0u), std::pair(first, 99u),
                                  std::pair(own, reinterpret_cast<uintptr_t>(memory + 100)), std::pair(second, 0u),
                                  std::pair(second, 99u)));
}

TEST(Recorder, ARegionTakesThePlaceOfThoseItOverlaps) {
  Recorder recorder;
  static std::byte memory[300];
  Kept kept;
  recorder.start(kept.sink());
  const auto add = [&](size_t begin, size_t bytes, uint64_t number, const char* label) {
    recorder.add_region(memory + begin, bytes, {.owner = 1, .number = number}, label);
  };
  add(0, 100, 1, "first");
  add(0, 100, 1, "first");
  add(100, 100, 2, "second");
  add(200, 100, 3, "third");
  add(99, 102, 4, "over all");
  const Access access = read_of(memory + 150, 1);
  recorder.host_access("one", "", {&access, 1});
  recorder.stop();
  EXPECT_THAT(kept.texts(),
              ElementsAre("rank 0, host: region first", "rank 0, host: region second", "rank 0, host: region third",
                          "rank 0, host: region end", "rank 0, host: region end", "rank 0, host: region end",
                          "rank 0, host: region over all", "rank 0, host: host access one"));
  EXPECT_EQ(kept.records().back().accesses[0].region.number, 4u);
}

TEST(Recorder, ARecordMayBeLargerThanABlock) {
  Recorder recorder;
  Kept kept;
  recorder.start(kept.sink());
  const std::vector<Access> accesses(RecordBlock::kBytes / sizeof(RecordedAccess) + 1, read_of(&recorder, 1, 3));
  recorder.host_access("small", "", {});
  recorder.host_access("large", "all", accesses);
  recorder.host_access("last", "", {});
  recorder.stop();
  EXPECT_THAT(kept.texts(), ElementsAre("rank 0, host: host access small", "rank 0, host: host access large all",
                                        "rank 0, host: host access last"));
  const Record large = kept.records()[1];
  EXPECT_EQ(large.sequence, 2u);
  ASSERT_EQ(large.accesses.size(), accesses.size());
  EXPECT_EQ(large.accesses.back().version, 3u);
}

TEST(Recorder, AnOperationOfTheHostIsRecordedWithItsWaits) {
  CpuDevice device;
  Kept kept;
  device.recorder().start(kept.sink());
  const std::byte memory[2] = {};
  TestWord first, second;
  first.set(1);
  second.set(1);
  const Operation inner{.name = "inner",
                        .after = {first.reaches(1, "inner first", {.rank = 0, .word = 3, .value = 1})}};
  device.caller()->enqueue({.name = "outer",
                            .subject = "w",
                            .accesses = {read_of(memory, 1)},
                            .after = {first.reaches(1, "first", {.rank = 0, .word = 1, .value = 1}),
                                      second.reaches(1, "second", {.rank = 0, .word = 2, .value = 1})},
                            // Another stream: an operation must not touch its own.
                            .body = [&] {
                              const auto other = device.make_stream({.name = "other", .runs_inline = true});
                              other->enqueue(inner);
                            }});
  device.caller()->enqueue({.name = "fails", .body = [] { throw Error(ErrorCode::kDataLoss, "lost"); }});
  static_cast<void>(device.caller()->take_error());
  device.caller()->enqueue({.name = "never", .after = {first.reaches(1, "third"), std::make_shared<LostCondition>()}});
  device.recorder().stop();
  EXPECT_THAT(kept.texts(), ElementsAre("rank 0, host: word wait inner first", "rank 0, host: operation inner",
                                        "rank 0, host: word wait first", "rank 0, host: word wait second",
                                        "rank 0, host: operation outer w", "rank 0, host: operation fails",
                                        "rank 0, host: word wait third"));
  EXPECT_THAT(kept.records()[3].words, ElementsAre(WordEdge{.rank = 0, .word = 2, .value = 1}));
  EXPECT_EQ(kept.times().size(), 2u);  // of those that ended
}

TEST(Recorder, StopTellsWhyTheSinkFailed) {
  Recorder recorder;
  recorder.start([](std::unique_ptr<RecordBlock>) -> std::unique_ptr<RecordBlock> {
    throw Error(ErrorCode::kResourceExhausted, "the disk is full");
  });
  constexpr size_t kMost = RecordBlock::kBytes / sizeof(RecordBlock::Entry);
  for (size_t i = 0; i <= kMost; ++i) recorder.host_access("x", "", {});
  EXPECT_FALSE(recorder.on());
  EXPECT_EQ(error_of([&] { recorder.stop(); }), "resource-exhausted: the disk is full");
  Kept kept;
  recorder.start(kept.sink());
  recorder.host_access("again", "", {});
  recorder.stop();
  EXPECT_THAT(kept.texts(), ElementsAre("rank 0, host: host access again"));
}

}  // namespace
}  // namespace tessera::device
