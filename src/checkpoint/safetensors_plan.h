// Where everything of a safetensors file will lie, before any of it is written.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint.h"

namespace tessera::checkpoint {

struct FilePlan {
  std::string head;  // the length field and the header
  std::vector<TensorInfo>
      tensors;  // in the order of the reference implementation: by dtype, the widest first, then by name
  std::vector<int64_t> offsets;  // of each of them, from the beginning of the file
  int64_t bytes = 0;             // of the whole file
};

// A pure function: processes that agree on the arguments agree on every byte's place. `path` is for messages. Throws
// Error(kInvalidArgument) for what no reader would take: two tensors of one name, one called `__metadata__`, an odd
// number of F4 elements, names that are not UTF-8, a header that is too long.
FilePlan plan_file(std::span<const TensorInfo> tensors, const std::map<std::string, std::string>& metadata,
                   std::string_view path);

}  // namespace tessera::checkpoint
