// The JSON header of a safetensors file: docs/formats/checkpoint-files.md.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint.h"

namespace tessera::checkpoint {

// A larger header is refused, as in the reference implementation.
inline constexpr uint64_t kMaxHeaderBytes = 100'000'000;
inline constexpr std::string_view kMetadataKey = "__metadata__";

struct HeaderEntry {
  TensorInfo info;
  int64_t begin = 0;  // of the tensor's data, from the end of the header
  int64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<HeaderEntry> tensors;  // ascending by position; they cover the data without gaps
  std::map<std::string, std::string> metadata;
};

// Parses and checks everything: names, dtypes, shapes, and that the tensors' bytes cover [0, data_bytes) exactly.
// `path` is for messages. Throws Error(kInvalidArgument).
SafetensorsHeader parse_header(std::string_view json, int64_t data_bytes, std::string_view path);

// The header's JSON for tensors in the order given, their bytes one after another, padded with spaces so that the data
// begins at a multiple of 8.
std::string format_header(std::span<const TensorInfo> tensors, const std::map<std::string, std::string>& metadata);

}  // namespace tessera::checkpoint
