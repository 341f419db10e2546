// The log of a rank on disk: docs/formats/etp-log.md. It is written in blocks with checksums, so that the log of a
// killed process can be read up to its last whole block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/bytes.h"
#include "base/fd.h"
#include "device/record/rank_log.h"
#include "device/record/record.h"

namespace tessera::device {

// The payload of blocks. Thread-compatible.
class LogEncoder {
 public:
  void append(const Record& record);
  // Of the block begun.
  std::span<const std::byte> block() const { return block_.view(); }
  void begin_block();

 private:
  friend class RecordOut;
  void put_text(std::string_view text);

  std::unordered_map<std::string, uint32_t> texts_;  // their numbers, from 1 on; in the whole file
  ByteWriter block_;
};

// The head of a file, and what precedes block `number` in it.
std::vector<std::byte> log_head(const LogHead& head);
std::vector<std::byte> block_head(const LogHead& head, uint64_t number, std::span<const std::byte> block);

// Writes a log; the order of append() is that of the records. Thread-compatible; blocks while the disk does.
class LogFile {
 public:
  static constexpr size_t kBlockBytes = size_t{64} << 10;  // a block is written once it has so many

  // Creates the file, or empties it. Throws Error if `path` cannot be written.
  LogFile(const std::string& path, const LogHead& head);
  // Flushes; an error becomes a warning in the log of this process.
  ~LogFile();
  LogFile(const LogFile&) = delete;
  LogFile& operator=(const LogFile&) = delete;

  // Both throw what the disk says. After that they do nothing, and the file can be read up to the block before.
  void append(const Record& record);
  void flush();  // what was appended so far survives the death of this process, though not of the machine

 private:
  const std::string path_;
  const LogHead head_;
  UniqueFd file_;
  LogEncoder encoder_;
  uint64_t blocks_ = 0;
};

// The log in the file `path`. Throws kNotFound and other errors of the disk; kInvalidArgument if it is no log, or one
// that no release writes; kMismatch if a later release has written it; kDataLoss if it is damaged other than at its
// end.
RankLog read_log(const std::string& path);
// The same of a file's bytes. They may come from anywhere; `what` names them in errors.
RankLog read_log(std::span<const std::byte> bytes, const std::string& what);

}  // namespace tessera::device
