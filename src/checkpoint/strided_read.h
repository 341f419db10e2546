// Reads a region of a row-major tensor from a file into packed memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "tessera/dtype.h"
#include "tessera/layout.h"

namespace tessera::checkpoint {

// A tensor's place in an open file.
struct FileTensor {
  int fd = -1;
  int64_t offset = 0;  // of its first byte
  DType dtype = DType::kF32;
  std::span<const Index> shape;
};

// Reads `region` into `dst`, packed. Contiguous elements take one pread; runs that are close together are read with the
// gaps between them and then separated, so that a column slice does not need a system call for each row. Throws
// Error(kInvalidArgument), whose message begins with `where`, for a file that ends early and for an F4 run that does
// not begin and end at a byte. REQUIRES: the region is inside the shape; dst has its exact size.
void read_region(const FileTensor& tensor, const Region& region, std::span<std::byte> dst, std::string_view where);

// Reads exactly dst.size() bytes at `offset`; throws if the file ends before.
void read_exactly(int fd, int64_t offset, std::span<std::byte> dst, std::string_view where);

}  // namespace tessera::checkpoint
