#include "device/record/record.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace tessera::device {

std::string_view to_string(RecordKind kind) {
  switch (kind) {
    case RecordKind::kActor:
      return "actor";
    case RecordKind::kRegion:
      return "region";
    case RecordKind::kRegionEnd:
      return "region end";
    case RecordKind::kOperation:
      return "operation";
    case RecordKind::kHostAccess:
      return "host access";
    case RecordKind::kEventRecord:
      return "event record";
    case RecordKind::kEventWait:
      return "event wait";
    case RecordKind::kWordWrite:
      return "word write";
    case RecordKind::kWordWait:
      return "word wait";
    case RecordKind::kCollective:
      return "collective";
    case RecordKind::kRan:
      return "ran";
    case RecordKind::kOperationAccess:
      return "operation access";
  }
  return "unknown";
}

std::string to_string(const Record& record) {
  std::string text = fmt::format("rank {}, ", record.rank);
  text += record.actor == 0 ? "host" : fmt::format("stream {}", record.actor);
  text += fmt::format(": {}", to_string(record.kind));
  if (record.operation != 0) text += fmt::format(" {}", record.operation);
  if (record.event != 0) text += fmt::format(" {}", record.event);
  if (record.number != 0) text += fmt::format(" {}", record.number);
  if (!record.name.empty()) text += fmt::format(" {}", record.name);
  if (!record.subject.empty()) text += fmt::format(" {}", record.subject);
  return text;
}

RecordBlock::RecordBlock()
    : records_(std::make_unique<Record[]>(kRecords)),
      accesses_(std::make_unique<RecordedAccess[]>(kAccesses)),
      words_(std::make_unique<WordEdge[]>(kWords)),
      text_(std::make_unique<char[]>(kTextBytes)) {}

std::string_view RecordBlock::keep(std::string_view text) {
  char* const begin = text_.get() + used_text_;
  if (!text.empty()) std::memcpy(begin, text.data(), text.size());
  used_text_ += text.size();
  return {begin, text.size()};
}

bool RecordBlock::fits(const Record& record) {
  return record.accesses.size() <= kAccesses && record.words.size() <= kWords && record.name.size() <= kTextBytes &&
         record.subject.size() <= kTextBytes - record.name.size();
}

bool RecordBlock::allot(Space& space, std::string_view name, std::string_view subject, size_t accesses, size_t words) {
  if (count_ == kRecords || accesses > kAccesses - used_accesses_ || words > kWords - used_words_) return false;
  if (name.size() + subject.size() > kTextBytes - used_text_) return false;
  Record& record = records_[count_++];
  record.name = keep(name);
  record.subject = keep(subject);
  space = {.record = &record, .accesses = &accesses_[used_accesses_], .words = &words_[used_words_]};
  record.accesses = {space.accesses, accesses};
  record.words = {space.words, words};
  used_accesses_ += accesses;
  used_words_ += words;
  return true;
}

void RecordBlock::Space::fill(const Record& from) const {
  const auto [name, subject] = std::pair(record->name, record->subject);
  const auto [read, written] = std::pair(record->accesses, record->words);
  *record = from;
  record->name = name;
  record->subject = subject;
  record->accesses = read;
  record->words = written;
}

bool RecordBlock::append(const Record& record) {
  Space space{};
  if (!fits(record) || !allot(space, record.name, record.subject, record.accesses.size(), record.words.size()))
    return false;
  std::ranges::copy(record.accesses, space.accesses);
  std::ranges::copy(record.words, space.words);
  space.fill(record);
  return true;
}

void RecordBlock::clear() {
  count_ = used_accesses_ = used_words_ = used_text_ = 0;
}

}  // namespace tessera::device
