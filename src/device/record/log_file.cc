#define XXH_INLINE_ALL
#include "device/record/log_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <deque>
#include <vector>

#include "base/escape.h"
#include "base/fail.h"
#include "base/fields.h"
#include "base/log.h"

namespace tessera::device {
namespace {

constexpr uint32_t kMagic = 0x4C534554;  // "TESL"
constexpr uint16_t kVersion = 1;
constexpr size_t kHeadBytes = 32;
constexpr size_t kBlockHeadBytes = 16;
constexpr uint32_t kMostBlockBytes = 64 << 20;
constexpr uint32_t kMostTextBytes = 4096;
constexpr uint32_t kMostItems = 1 << 20;  // accesses or words of a record
constexpr int32_t kMostLogRanks = 1 << 20;

uint64_t checksum(std::span<const std::byte> bytes, uint64_t seed) {
  return XXH3_64bits_withSeed(bytes.data(), bytes.size(), seed);
}

// The texts of a log that is read.
class TextsRead {
 public:
  std::string_view read(ByteReader& in) {
    const auto number = in.get<uint32_t>();
    if (number == 0) return {};
    if (number <= texts_.size()) return texts_[number - 1];
    if (number != texts_.size() + 1)
      fail(ErrorCode::kInvalidArgument, "{}: text {} follows text {}"_message, in.what(), number, texts_.size());
    return texts_.emplace_back(in.get_string(kMostTextBytes));
  }

 private:
  std::deque<std::string> texts_;
};

void region_fields(auto& f, auto& region) {
  f("owner", region.owner);
  f("region", region.number);
}

struct AccessFields {
  static constexpr size_t kLeast = 37;
  static void fields(auto& f, auto& access) {
    region_fields(f, access.region);
    f("offset", access.offset);
    f("bytes", access.bytes);
    f("version", access.version);
    f("write", access.write);
    f.require(access.bytes <= UINT64_MAX - access.offset, "{}: {} B from byte {} on: no range"_message, f.what(),
              access.bytes, access.offset);
  }
};

struct WordFields {
  static constexpr size_t kLeast = 20;
  static void fields(auto& f, auto& word) {
    f("rank", word.rank);
    f("word", word.word);
    f("value", word.value);
  }
};

// What reads the texts and lists of a record; RecordOut writes them.
class RecordIn {
 public:
  RecordIn(TextsRead& texts, ByteReader& in) : texts_(texts), in_(in), fields_(in) {}

  FieldReader& fields() { return fields_; }
  void text(std::string_view& text) { text = texts_.read(in_); }
  template <typename Fields, typename T>
  void list(std::span<const T>& items, std::vector<T>& room) {
    room.clear();
    for (uint32_t count = in_.get_count(kMostItems, Fields::kLeast); count > 0; --count)
      Fields::fields(fields_, room.emplace_back());
    items = room;
  }

 private:
  TextsRead& texts_;
  ByteReader& in_;
  FieldReader fields_;
};

// Where the lists of a record are read to; used again for the next one.
struct Room {
  std::vector<RecordedAccess> accesses;
  std::vector<WordEdge> words;
};

// The one description of a record, for both directions.
template <typename Way, typename AnyRecord>
void record_fields(Way& way, AnyRecord& record, Room& room) {
  auto& f = way.fields();
  f("kind", record.kind, RecordKind::kOperationAccess);
  switch (record.kind) {
    case RecordKind::kActor:
      f("actor", record.actor);
      return way.text(record.name);
    case RecordKind::kRegion:
      region_fields(f, record.region);
      f("bytes", record.bytes);
      return way.text(record.name);
    case RecordKind::kRegionEnd:
      return region_fields(f, record.region);
    case RecordKind::kOperation:
      f("actor", record.actor);
      f("operation", record.operation);
      f("waits", record.waits);
      way.text(record.name);
      way.text(record.subject);
      way.template list<AccessFields>(record.accesses, room.accesses);
      return way.template list<WordFields>(record.words, room.words);
    case RecordKind::kHostAccess:
      way.text(record.name);
      way.text(record.subject);
      return way.template list<AccessFields>(record.accesses, room.accesses);
    case RecordKind::kEventRecord:
    case RecordKind::kEventWait:
      f("actor", record.actor);
      return f("event", record.event);
    case RecordKind::kWordWrite:
      way.text(record.subject);
      return way.template list<WordFields>(record.words, room.words);
    case RecordKind::kWordWait:
      f("actor", record.actor);
      f("operation", record.operation);
      way.text(record.subject);
      return way.template list<WordFields>(record.words, room.words);
    case RecordKind::kCollective:
      f("number", record.number);
      f("ranks", record.ranks);
      way.text(record.name);
      return way.text(record.subject);
    case RecordKind::kRan:
      f("actor", record.actor);
      f("operation", record.operation);
      f("begin", record.begin);
      return f("end", record.end);
    case RecordKind::kOperationAccess:
      f("actor", record.actor);
      f("operation", record.operation);
      way.text(record.name);
      way.text(record.subject);
      return way.template list<AccessFields>(record.accesses, room.accesses);
  }
}

LogHead read_head(std::span<const std::byte> bytes, const std::string& what) {
  ByteReader in(bytes, what);
  if (bytes.size() < kHeadBytes || in.get<uint32_t>() != kMagic)
    fail(ErrorCode::kInvalidArgument, "{}: this is no schedule log"_message, what);
  const auto version = in.get<uint16_t>();
  if (version != kVersion)
    fail(ErrorCode::kMismatch, "{}: its format is of version {}, this release reads version {}"_message, what, version,
         kVersion);
  const auto zero = in.get<uint16_t>();
  LogHead head;
  head.run = in.get<uint64_t>();
  head.rank = in.get<int32_t>();
  head.ranks = in.get<int32_t>();
  if (in.get<uint64_t>() != checksum(bytes.first(kHeadBytes - sizeof(uint64_t)), 0) || zero != 0)
    fail(ErrorCode::kDataLoss, "{}: the head is damaged"_message, what);
  if (head.ranks < 1 || head.ranks > kMostLogRanks || head.rank < 0 || head.rank >= head.ranks)
    fail(ErrorCode::kInvalidArgument, "{}: a log of rank {} of {}"_message, what, head.rank, head.ranks);
  return head;
}

// What is left of a file after its head, block by block.
class LogBlocks {
 public:
  LogBlocks(std::span<const std::byte> bytes, uint64_t run, const std::string& what)
      : rest_(bytes), run_(run), what_(what) {}

  // Empty at the end, or where the rest was written in part.
  std::span<const std::byte> next() {
    if (rest_.size() < kBlockHeadBytes) return {};
    ByteReader in(rest_.first(kBlockHeadBytes), what_);
    const auto bytes = in.get<uint32_t>();
    const auto zero = in.get<uint32_t>();
    const auto sum = in.get<uint64_t>();
    if (bytes > rest_.size() - kBlockHeadBytes) return {};
    const std::span<const std::byte> block = rest_.subspan(kBlockHeadBytes, bytes);
    const bool last = rest_.size() == kBlockHeadBytes + bytes;
    if (bytes == 0 || bytes > kMostBlockBytes || zero != 0 || sum != checksum(block, run_ + number_)) {
      if (last) return {};
      fail(ErrorCode::kDataLoss, "{}: block {} is damaged"_message, what_, number_);
    }
    rest_ = rest_.subspan(kBlockHeadBytes + bytes);
    ++number_;
    return block;
  }
  uint64_t left() const { return rest_.size(); }

 private:
  std::span<const std::byte> rest_;
  const uint64_t run_;
  const std::string& what_;
  uint64_t number_ = 0;
};

std::vector<std::byte> file_bytes(const std::string& path) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat about{};
  if (!file || ::fstat(file.get(), &about) != 0) fail_errno(path);
  if (!S_ISREG(about.st_mode)) fail(ErrorCode::kInvalidArgument, "{}: this is no schedule log"_message, path);
  std::vector<std::byte> bytes(static_cast<size_t>(about.st_size));
  size_t got = 0;
  while (got < bytes.size()) {
    const ssize_t now = ::read(file.get(), bytes.data() + got, bytes.size() - got);
    if (now < 0 && errno == EINTR) continue;
    if (now < 0) fail_errno(path);
    if (now == 0) break;  // it was cut in between
    got += static_cast<size_t>(now);
  }
  bytes.resize(got);
  return bytes;
}

void write_all(int file, std::span<const std::byte> bytes, const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t put = ::write(file, bytes.data(), bytes.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail_errno("schedule log " + path);
    bytes = bytes.subspan(static_cast<size_t>(put));
  }
}

}  // namespace

class RecordOut {
 public:
  explicit RecordOut(LogEncoder& encoder) : encoder_(encoder), fields_(encoder.block_) {}

  FieldWriter& fields() { return fields_; }
  void text(std::string_view text) { encoder_.put_text(text); }
  template <typename Fields, typename T>
  void list(std::span<const T> items, std::vector<T>&) {
    encoder_.block_.put(static_cast<uint32_t>(items.size()));
    for (const T& item : items) Fields::fields(fields_, item);
  }

 private:
  LogEncoder& encoder_;
  FieldWriter fields_;
};

void LogEncoder::append(const Record& record) {
  TESSERA_CHECK(record.accesses.size() <= kMostItems && record.words.size() <= kMostItems);
  RecordOut out(*this);
  Room unused;
  record_fields(out, record, unused);
}

void LogEncoder::begin_block() {
  block_.clear(2 * LogFile::kBlockBytes);
}

void LogEncoder::put_text(std::string_view text) {
  text = text.substr(0, kMostTextBytes);
  if (text.empty()) return block_.put(uint32_t{0});
  const auto [found, fresh] = texts_.try_emplace(std::string(text), static_cast<uint32_t>(texts_.size() + 1));
  block_.put(found->second);
  if (fresh) block_.put_string(text);
}

std::vector<std::byte> log_head(const LogHead& head) {
  ByteWriter out;
  out.put(kMagic);
  out.put(kVersion);
  out.put(uint16_t{0});
  out.put(head.run);
  out.put(head.rank);
  out.put(head.ranks);
  out.put(checksum(out.view(), 0));
  return out.take();
}

std::vector<std::byte> block_head(const LogHead& head, uint64_t number, std::span<const std::byte> block) {
  ByteWriter out;
  out.put(static_cast<uint32_t>(block.size()));
  out.put(uint32_t{0});
  out.put(checksum(block, head.run + number));
  return out.take();
}

LogFile::LogFile(const std::string& path, const LogHead& head)
    : path_(path), head_(head), file_(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644)) {
  if (!file_) fail_errno("schedule log " + path);
  write_all(file_.get(), log_head(head), path_);
}

LogFile::~LogFile() {
  try {
    flush();
  } catch (const Error& error) {
    log_event(LogLevel::warn, "schedule_log.incomplete", {}, "the end of a schedule log is lost: {}"_message,
              error.what());
  }
}

void LogFile::append(const Record& record) {
  if (!file_) return;
  encoder_.append(record);
  if (encoder_.block().size() >= kBlockBytes) flush();
}

void LogFile::flush() {
  const std::span<const std::byte> block = encoder_.block();
  if (!file_ || block.empty()) return;
  UniqueFd file = std::move(file_);  // closed after an error: the file ends in the middle of a block
  write_all(file.get(), block_head(head_, blocks_++, block), path_);
  write_all(file.get(), block, path_);
  encoder_.begin_block();
  file_ = std::move(file);
}

RankLog read_log(const std::string& path) {
  return read_log(file_bytes(path), path);
}

RankLog read_log(std::span<const std::byte> bytes, const std::string& what) {
  const LogHead head = read_head(bytes, what);
  RankLog log(head);
  LogBlocks blocks(bytes.subspan(kHeadBytes), head.run, what);
  TextsRead texts;
  Room room;
  for (auto block = blocks.next(); !block.empty(); block = blocks.next()) {
    ByteReader in(block, what);
    RecordIn way(texts, in);
    while (in.left() > 0) {
      Record record;
      record_fields(way, record, room);
      log.append(record);
    }
  }
  log.set_torn_bytes(blocks.left());
  return log;
}

}  // namespace tessera::device
