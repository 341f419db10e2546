// One open safetensors file.
#pragma once

#include <filesystem>
#include <string>

#include "base/fd.h"
#include "checkpoint/safetensors_header.h"

namespace tessera::checkpoint {

// Opened and checked. Const calls are thread-safe.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);

  const std::string& path() const { return path_; }
  const SafetensorsHeader& header() const { return header_; }
  void read(const HeaderEntry& entry, const Region& region, std::span<std::byte> dst) const;
  // Reads a tensor whole, in pieces. Returns the text of its digest.
  std::string checksum(const HeaderEntry& entry) const;

 private:
  std::string path_;
  UniqueFd fd_;
  int64_t data_offset_ = 0;
  SafetensorsHeader header_;
};

// Opens a regular file for reading; `size` becomes its size. Throws Error(kNotFound), Error(kPermissionDenied), ...
UniqueFd open_regular_file(const std::filesystem::path& path, int64_t& size);

}  // namespace tessera::checkpoint
