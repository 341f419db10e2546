#include "device/record/log_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "base/testing.h"
#include "device/record/logs_testing.h"

namespace tessera::device {
namespace {

using testing::HasSubstr;

constexpr size_t kHeadBytes = 32;  // docs/formats/etp-log.md
constexpr size_t kBlockHeadBytes = 16;

class LogFileTest : public testing::Test {
 protected:
  LogFileTest() {
    char folder[] = "/tmp/tessera-log-XXXXXX";
    folder_ = ::mkdtemp(folder);
    path_ = folder_ + "/rank0.etplog";
  }
  ~LogFileTest() override { std::filesystem::remove_all(folder_); }

  std::string bytes() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void put(const std::string& bytes) const { std::ofstream(path_, std::ios::binary | std::ios::trunc) << bytes; }

  std::string folder_;
  std::string path_;
};

// One record of each kind, with every field that its kind has.
std::vector<Record> all_kinds(std::vector<RecordedAccess>& accesses, std::vector<WordEdge>& words) {
  accesses = {
      {.region = {.owner = 3, .number = 9}, .offset = 64, .bytes = 128, .version = 7, .write = true},
      {.region = {.owner = 0, .number = 0}, .offset = UINT64_MAX - 1, .bytes = 1, .version = 0, .write = false}};
  words = {{.rank = 2, .word = 17, .value = UINT64_MAX}, {.rank = 0, .word = 0, .value = 0}};
  const std::string_view name = "gather";
  const std::string_view subject = "wte.weight";
  return {
      {.kind = RecordKind::kActor, .actor = 4, .name = name},
      {.kind = RecordKind::kRegion, .region = {.owner = 3, .number = 9}, .bytes = 4096, .name = "arena"},
      {.kind = RecordKind::kRegionEnd, .region = {.owner = 3, .number = 9}},
      {.kind = RecordKind::kOperation,
       .actor = 4,
       .operation = 5,
       .waits = 2,
       .name = name,
       .subject = subject,
       .accesses = accesses,
       .words = words},
      {.kind = RecordKind::kHostAccess, .name = name, .subject = subject, .accesses = accesses},
      {.kind = RecordKind::kEventRecord, .actor = 4, .event = 6},
      {.kind = RecordKind::kEventWait, .actor = 0, .event = 6},
      {.kind = RecordKind::kWordWrite, .subject = subject, .words = words},
      {.kind = RecordKind::kWordWait, .actor = 4, .operation = 5, .subject = subject, .words = words},
      {.kind = RecordKind::kCollective, .number = 8, .ranks = 4, .name = "barrier", .subject = "etp"},
      {.kind = RecordKind::kRan, .actor = 4, .operation = 5, .begin = -5, .end = INT64_MAX},
      {.kind = RecordKind::kOperationAccess,
       .actor = 4,
       .operation = 5,
       .name = "fold",
       .subject = "wte.weight",
       .accesses = accesses},
  };
}

void expect_equal(const Record& a, const Record& b) {
  SCOPED_TRACE(to_string(a));
  EXPECT_EQ(a.kind, b.kind);
  EXPECT_EQ(a.actor, b.actor);
  EXPECT_EQ(a.operation, b.operation);
  EXPECT_EQ(a.waits, b.waits);
  EXPECT_EQ(a.event, b.event);
  EXPECT_EQ(a.number, b.number);
  EXPECT_EQ(a.ranks, b.ranks);
  EXPECT_EQ(a.region, b.region);
  EXPECT_EQ(a.bytes, b.bytes);
  EXPECT_EQ(a.begin, b.begin);
  EXPECT_EQ(a.end, b.end);
  EXPECT_EQ(a.name, b.name);
  EXPECT_EQ(a.subject, b.subject);
  EXPECT_TRUE(std::ranges::equal(a.accesses, b.accesses));
  EXPECT_TRUE(std::ranges::equal(a.words, b.words));
}

TEST_F(LogFileTest, HoldsEveryKindOfRecord) {
  std::vector<RecordedAccess> accesses;
  std::vector<WordEdge> words;
  const std::vector<Record> records = all_kinds(accesses, words);
  ASSERT_EQ(records.size(), static_cast<size_t>(RecordKind::kOperationAccess) + 1);
  const LogHead head{.run = 0x1122334455667788, .rank = 2, .ranks = 4};
  {
    LogFile file(path_, head);
    for (const Record& record : records) file.append(record);
  }
  const RankLog log = read_log(path_);
  EXPECT_EQ(log.head(), head);
  EXPECT_EQ(log.torn_bytes(), 0u);
  ASSERT_EQ(log.records().size(), records.size());
  for (size_t i = 0; i < records.size(); ++i) {
    expect_equal(log.records()[i], records[i]);
    EXPECT_EQ(log.records()[i].sequence, i + 1);
    EXPECT_EQ(log.records()[i].rank, 2);
  }
}

// Several blocks of records whose texts repeat.
void write_many(LogFile& file, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) {
    const RecordedAccess access = writes(0, i, i + 1, i);
    file.append({.kind = RecordKind::kOperation,
                 .actor = 1,
                 .operation = i + 1,
                 .name = "gather",
                 .subject = "layer " + std::to_string(i % 100),
                 .accesses = {&access, 1}});
  }
}

void expect_many(const RankLog& log, uint64_t count) {
  ASSERT_EQ(log.records().size(), count);
  for (uint64_t i = 0; i < count; ++i) {
    const Record& record = log.records()[i];
    EXPECT_EQ(record.operation, i + 1);
    EXPECT_EQ(record.subject, "layer " + std::to_string(i % 100));
    ASSERT_EQ(record.accesses.size(), 1u);
    EXPECT_EQ(record.accesses[0], writes(0, i, i + 1, i));
  }
}

TEST_F(LogFileTest, HoldsManyBlocks) {
  {
    LogFile file(path_, {});
    write_many(file, 20'000);
  }
  EXPECT_GT(bytes().size(), 4 * LogFile::kBlockBytes);
  expect_many(read_log(path_), 20'000);
}

TEST_F(LogFileTest, IsSmall) {
  {
    LogFile file(path_, {});
    write_many(file, 20'000);
  }
  EXPECT_LT(bytes().size(), 20'000u * 80);
}

TEST_F(LogFileTest, OfAKilledProcessHasWhatWasFlushed) {
  const pid_t child = ::fork();
  if (child == 0) {
    LogFile file(path_, {});
    write_many(file, 1000);
    file.flush();
    file.append({.kind = RecordKind::kHostAccess, .name = "lost"});
    ::raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  expect_many(read_log(path_), 1000);
}

TEST_F(LogFileTest, CutAnywhereHasAllWholeBlocks) {
  std::vector<size_t> ends;  // of blocks
  {
    LogFile file(path_, {});
    ends.push_back(bytes().size());
    for (int block = 0; block < 3; ++block) {
      file.append({.kind = RecordKind::kHostAccess, .name = "block", .subject = std::to_string(block)});
      file.flush();
      ends.push_back(bytes().size());
    }
  }
  const std::string whole = bytes();
  ASSERT_EQ(ends.front(), kHeadBytes);
  ASSERT_EQ(ends.back(), whole.size());
  for (size_t size = kHeadBytes; size <= whole.size(); ++size) {
    const RankLog log = read_log(std::as_bytes(std::span(whole).first(size)), "log");
    const auto blocks = static_cast<size_t>(std::ranges::upper_bound(ends, size) - ends.begin()) - 1;
    EXPECT_EQ(log.records().size(), blocks);
    EXPECT_EQ(log.torn_bytes(), size - ends[blocks]);
  }
  for (size_t size = 0; size < kHeadBytes; ++size)
    EXPECT_EQ(error_of([&] { read_log(std::as_bytes(std::span(whole).first(size)), "log"); }),
              "log: this is no schedule log");
}

TEST_F(LogFileTest, DamagedAnywhereIsNeverTakenForAnotherLog) {
  {
    LogFile file(path_, {.run = 1});
    for (int block = 0; block < 3; ++block) {
      file.append({.kind = RecordKind::kHostAccess, .name = "block", .subject = std::to_string(block)});
      file.flush();
    }
  }
  const std::string whole = bytes();
  const size_t count = read_log(path_).records().size();
  for (size_t at = 0; at < whole.size(); ++at) {
    SCOPED_TRACE(at);
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x10);
    try {
      const RankLog log = read_log(std::as_bytes(std::span(damaged)), "log");
      EXPECT_LT(log.records().size(), count);  // the last block, or a length beyond the end
      EXPECT_GT(log.torn_bytes(), 0u);
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), testing::StartsWith("log: "));
    }
  }
}

TEST_F(LogFileTest, WithADamagedBlockInsideIsRefused) {
  {
    LogFile file(path_, {});
    write_many(file, 5000);
  }
  std::string damaged = bytes();
  damaged[kHeadBytes + kBlockHeadBytes + 100] ^= 1;
  put(damaged);
  EXPECT_EQ(error_of([&] { read_log(path_); }), "data-loss: " + path_ + ": block 0 is damaged");
}

TEST_F(LogFileTest, BlocksOfAnotherRunOrPlaceAreRefused) {
  std::string files[2];
  for (const uint64_t run : {0, 100}) {
    {
      LogFile file(path_, {.run = run});
      write_many(file, 5000);
    }
    files[run == 0 ? 0 : 1] = bytes();
  }
  put(files[0].substr(0, kHeadBytes) + files[1].substr(kHeadBytes));
  EXPECT_THAT(error_of([&] { read_log(path_); }), HasSubstr("block 0 is damaged"));
}

TEST_F(LogFileTest, OfALaterReleaseIsNamed) {
  {
    const LogFile file(path_, {});
  }
  std::string later = bytes();
  later[4] = 2;
  put(later);
  EXPECT_EQ(error_of([&] { read_log(path_); }),
            "mismatch: " + path_ + ": its format is of version 2, this release reads version 1");
}

TEST_F(LogFileTest, OfARankThatThereIsNot) {
  {
    const LogFile file(path_, {.run = 1, .rank = 4, .ranks = 4});
  }
  EXPECT_EQ(error_of([&] { read_log(path_); }), path_ + ": a log of rank 4 of 4");
}

TEST_F(LogFileTest, ThatIsNotThere) {
  EXPECT_EQ(error_of([&] { read_log(path_); }), "not-found: " + path_ + ": No such file or directory");
  EXPECT_EQ(error_of([&] { read_log(folder_); }), folder_ + ": this is no schedule log");
  EXPECT_EQ(error_of([&] { LogFile(folder_ + "/none/log", {}); }),
            "not-found: schedule log " + folder_ + "/none/log: No such file or directory");
}

TEST_F(LogFileTest, OnAFullDiskFails) {
  EXPECT_EQ(error_of([] { LogFile("/dev/full", {}); }),
            "resource-exhausted: schedule log /dev/full: No space left on device");
}

// The disk refuses what goes beyond the limit of a file's size.
TEST_F(LogFileTest, ThatCannotGrowKeepsItsWholeBlocksAndFailsOnce) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::signal(SIGXFSZ, SIG_IGN);
    LogFile file(path_, {});
    write_many(file, 100);
    file.flush();
    const rlimit limit{.rlim_cur = std::filesystem::file_size(path_) + 10, .rlim_max = RLIM_INFINITY};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    file.append({.kind = RecordKind::kHostAccess, .name = "one that does not fit"});
    const std::string error = error_of([&] { file.flush(); });
    file.append({.kind = RecordKind::kHostAccess, .name = "ignored"});
    file.flush();
    ::_exit(error == "schedule log " + path_ + ": File too large" ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  expect_many(read_log(path_), 100);
}

TEST_F(LogFileTest, LongTextsAreCut) {
  {
    LogFile file(path_, {});
    file.append({.kind = RecordKind::kHostAccess, .name = std::string(10'000, 'x'), .subject = "y"});
  }
  const RankLog log = read_log(path_);
  EXPECT_EQ(log.records()[0].name, std::string(4096, 'x'));
  EXPECT_EQ(log.records()[0].subject, "y");
}

TEST(RankLogTest, OwnsWhatItHolds) {
  RankLog log(LogHead{});
  for (uint64_t i = 0; i < 20'000; ++i) {
    std::string name = "operation " + std::to_string(i % 300);
    std::vector<RecordedAccess> accesses(i % 4, writes(0, i, i + 1));
    std::vector<WordEdge> words(i % 3, {.rank = 0, .word = i, .value = i});
    log.append({.kind = RecordKind::kOperation, .name = name, .accesses = accesses, .words = words});
    name.assign(name.size(), 'x');
    accesses.assign(accesses.size(), {});
    words.assign(words.size(), {});
  }
  const RankLog moved = std::move(log);
  for (uint64_t i = 0; i < 20'000; ++i) {
    const Record& record = moved.records()[i];
    EXPECT_EQ(record.name, "operation " + std::to_string(i % 300));
    ASSERT_EQ(record.accesses.size(), i % 4);
    for (const RecordedAccess& access : record.accesses) EXPECT_EQ(access, writes(0, i, i + 1));
    ASSERT_EQ(record.words.size(), i % 3);
    for (const WordEdge& word : record.words) EXPECT_EQ(word, (WordEdge{.rank = 0, .word = i, .value = i}));
  }
}

// A file with one block, whose checksum is right.
std::string file_of_block(std::span<const std::byte> block) {
  std::string file;
  for (const auto& part : {log_head({}), block_head({}, 0, block), {block.begin(), block.end()}})
    file.append(reinterpret_cast<const char*>(part.data()), part.size());
  return file;
}

std::string error_of_block(const ByteWriter& block) {
  const std::string file = file_of_block(block.view());
  return error_of([&] { read_log(std::as_bytes(std::span(file)), "log"); });
}

TEST(HostileLogs, WithBlocksThatNoReleaseWrites) {
  ByteWriter kind;
  kind.put(uint8_t{200});
  EXPECT_EQ(error_of_block(kind), "log: unknown code 200");
  ByteWriter text;
  text.put(RecordKind::kActor);
  text.put(uint32_t{1});
  text.put(uint32_t{2});  // text 2 before text 1
  EXPECT_EQ(error_of_block(text), "log: text 2 follows text 0");
  ByteWriter range;
  range.put(RecordKind::kHostAccess);
  for (const uint32_t number : {0, 0, 1, 0}) range.put(number);  // no texts, one access, its owner
  for (const uint64_t number : {uint64_t{1}, UINT64_MAX, uint64_t{2}, uint64_t{0}}) range.put(number);
  range.put(uint8_t{0});
  EXPECT_EQ(error_of_block(range), "log: 2 B from byte 18446744073709551615 on: no range");
  ByteWriter count;
  count.put(RecordKind::kHostAccess);
  for (const uint32_t number : {0u, 0u, 1000u}) count.put(number);
  EXPECT_THAT(error_of_block(count), HasSubstr("log: a count of 1000 where at most 1048576 fit"));
  ByteWriter cut;
  cut.put(RecordKind::kEventRecord);
  cut.put(uint32_t{1});
  EXPECT_EQ(error_of_block(cut), "log: truncated, 8 bytes wanted and 0 left");
}

TEST(HostileLogs, OfAnyBytesBehindARightChecksumAreReadOrRefused) {
  std::vector<RecordedAccess> accesses;
  std::vector<WordEdge> words;
  LogEncoder encoder;
  for (const Record& record : all_kinds(accesses, words)) encoder.append(record);
  std::mt19937_64 random(5);
  size_t refused = 0;
  for (int i = 0; i < 5000; ++i) {
    std::vector<std::byte> block(encoder.block().begin(), encoder.block().end());
    for (uint64_t changes = 1 + random() % 3; changes > 0; --changes)
      block[random() % block.size()] = static_cast<std::byte>(random());
    const std::string file = file_of_block(block);
    const std::string error = error_of([&] { read_log(std::as_bytes(std::span(file)), "log"); });
    if (error == "(no error)") continue;
    ++refused;
    EXPECT_THAT(error, testing::StartsWith("log: "));
  }
  EXPECT_GT(refused, 500u);
  EXPECT_LT(refused, 4500u);
}

}  // namespace
}  // namespace tessera::device
