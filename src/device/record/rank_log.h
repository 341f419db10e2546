// The log of one rank, whole: what is checked, drawn, and written to a file. docs/formats/etp-log.md
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "device/record/record.h"

namespace tessera::device {

// What all records of a log have in common.
struct LogHead {
  uint64_t run = 0;  // the same in the logs of all ranks of a run; drawn at random for each run
  int32_t rank = 0;
  int32_t ranks = 1;

  bool operator==(const LogHead&) const = default;
};

// In memory. Move-only, and a move leaves the records where they are; thread-compatible.
class RankLog {
 public:
  explicit RankLog(const LogHead& head) : head_(head) {}
  RankLog(RankLog&&) noexcept = default;
  RankLog& operator=(RankLog&&) noexcept = default;
  RankLog(const RankLog&) = delete;
  RankLog& operator=(const RankLog&) = delete;

  // Copies the record with all that it points to. Its rank becomes that of the log, its sequence the next one.
  void append(const Record& record);

  const LogHead& head() const { return head_; }
  const std::vector<Record>& records() const { return records_; }  // record n is records()[n - 1]
  // Bytes at the end of the file whose writing was cut off; nothing of them is among the records.
  uint64_t torn_bytes() const { return torn_bytes_; }
  void set_torn_bytes(uint64_t bytes) { torn_bytes_ = bytes; }

 private:
  // In blocks that do not grow beyond their capacity, so that spans of them last.
  template <typename T>
  using Blocks = std::deque<std::vector<T>>;

  std::string_view keep(std::string_view text);
  template <typename T>
  std::span<const T> keep(Blocks<T>& blocks, std::span<const T> items);

  LogHead head_;
  std::vector<Record> records_;
  std::unordered_set<std::string> texts_;  // whose elements do not move
  Blocks<RecordedAccess> accesses_;
  Blocks<WordEdge> words_;
  uint64_t torn_bytes_ = 0;
};

}  // namespace tessera::device
