#include "device/record/record.h"

#include <fmt/format.h>

namespace tessera::device {
namespace {

std::string_view text_of(const char* text) {
  return text == nullptr ? std::string_view() : text;
}

}  // namespace

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

RecordBlock::RecordBlock(size_t bytes)
    : memory_(std::make_unique_for_overwrite<std::byte[]>(bytes)), capacity_(bytes) {}

void RecordBlock::begin(int rank, uint64_t first) {
  used_ = count_ = 0;
  rank_ = rank;
  first_ = first;
}

std::ranges::subrange<RecordIterator> RecordBlock::records() const {
  RecordIterator begin, end;
  begin.block_ = end.block_ = this;
  begin.at_ = memory_.get();
  begin.sequence_ = first_;
  end.at_ = memory_.get() + used_;
  return {begin, end};
}

RecordIterator& RecordIterator::operator++() {
  at_ += reinterpret_cast<const RecordBlock::Entry*>(at_)->bytes;
  ++sequence_;
  return *this;
}

Record RecordIterator::operator*() const {
  const RecordBlock::Entry& entry = *reinterpret_cast<const RecordBlock::Entry*>(at_);
  Record record{.kind = entry.kind,
                .rank = block_->rank_,
                .actor = entry.actor,
                .sequence = sequence_,
                .name = text_of(entry.name),
                .subject = text_of(entry.subject),
                .accesses = {entry.accesses(), entry.access_count},
                .words = {entry.words(), entry.word_count}};
  switch (entry.kind) {
    case RecordKind::kActor:
    case RecordKind::kHostAccess:
    case RecordKind::kWordWrite:
      break;
    case RecordKind::kRegion:
    case RecordKind::kRegionEnd:
      record.region = {.owner = static_cast<int>(entry.end), .number = entry.number};
      record.bytes = entry.begin;
      break;
    case RecordKind::kOperation:
      record.waits = entry.count;
      [[fallthrough]];
    case RecordKind::kWordWait:
    case RecordKind::kOperationAccess:
      record.operation = entry.number;
      break;
    case RecordKind::kEventRecord:
    case RecordKind::kEventWait:
      record.event = entry.number;
      break;
    case RecordKind::kCollective:
      record.number = entry.number;
      record.ranks = entry.count;
      break;
    case RecordKind::kRan:
      record.operation = entry.number;
      record.begin = block_->scale_.time_of(entry.begin).time_since_epoch().count();
      record.end = block_->scale_.time_of(entry.end).time_since_epoch().count();
      break;
  }
  return record;
}

}  // namespace tessera::device
