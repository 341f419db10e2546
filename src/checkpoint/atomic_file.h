// A file that appears whole or not at all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include "base/fd.h"

namespace tessera::checkpoint {

// The bytes go to an unnamed file (O_TMPFILE) in the target's folder, which the kernel frees if the process dies. On
// file systems without O_TMPFILE they go to `.NAME.new`, which is logged once for each file: then a SIGKILL can leave
// that file, and the next writer of the target removes it. Not thread-safe.
class AtomicFile {
 public:
  // Reserves `bytes` on the disk. Throws Error(kResourceExhausted), which names path and bytes, if they do not fit.
  AtomicFile(std::filesystem::path path, int64_t bytes);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void append(std::span<const std::byte> bytes);
  // Flushes to disk and gives the file its name, replacing any file of that name.
  void commit();

 private:
  void open_unnamed();
  void open_named();
  void replace();

  std::filesystem::path path_;
  std::string hidden_name_;  // in the target's folder
  int64_t bytes_;
  int64_t written_ = 0;
  UniqueFd folder_;
  UniqueFd file_;
  bool named_ = false;  // hidden_name_ exists and must be removed
};

}  // namespace tessera::checkpoint
