#include "checkpoint/strided_read.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "base/fail.h"
#include "checkpoint/region_runs.h"

namespace tessera::checkpoint {
namespace {

// The most that one pread gathers while runs are at most kMaxGap apart: a window stays in the L2 cache, and copying a
// gap is cheaper than a system call.
constexpr int64_t kWindowBytes = 512 << 10;
constexpr int64_t kMaxGap = 4 << 10;

// Gathers runs of a file, in ascending order, into consecutive memory.
class RunReader {
 public:
  RunReader(int fd, std::byte* dst, std::string_view where) : fd_(fd), dst_(dst), where_(where) {}

  void add(int64_t offset, int64_t bytes) {
    if (!runs_.empty()) {
      const Run& last = runs_.back();
      if (offset - (last.offset + last.bytes) > kMaxGap || offset + bytes - runs_.front().offset > kWindowBytes)
        flush();
    }
    runs_.push_back({offset, bytes});
  }

  void flush() {
    if (runs_.empty()) return;
    if (runs_.size() == 1) {
      read_exactly(fd_, runs_[0].offset, {dst_, static_cast<size_t>(runs_[0].bytes)}, where_);
      dst_ += runs_[0].bytes;
    } else {
      if (!window_) window_ = std::make_unique_for_overwrite<std::byte[]>(kWindowBytes);
      const int64_t first = runs_.front().offset;
      const int64_t span = runs_.back().offset + runs_.back().bytes - first;
      read_exactly(fd_, first, {window_.get(), static_cast<size_t>(span)}, where_);
      for (const Run& run : runs_) {
        std::memcpy(dst_, window_.get() + (run.offset - first), static_cast<size_t>(run.bytes));
        dst_ += run.bytes;
      }
    }
    runs_.clear();
  }

 private:
  struct Run {
    int64_t offset;
    int64_t bytes;
  };

  int fd_;
  std::byte* dst_;
  std::string_view where_;
  std::vector<Run> runs_;
  std::unique_ptr<std::byte[]> window_;
};

}  // namespace

void read_exactly(int fd, int64_t offset, std::span<std::byte> dst, std::string_view where) {
  while (!dst.empty()) {
    const ssize_t n = ::pread(fd, dst.data(), dst.size(), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_errno(fmt::format("{}: cannot read {} bytes at {}", where, dst.size(), offset));
    if (n == 0)
      fail(ErrorCode::kInvalidArgument, "{}: the file ends at {}, {} bytes early: it was truncated"_message, where,
           offset, dst.size());
    dst = dst.subspan(static_cast<size_t>(n));
    offset += n;
  }
}

void read_region(const FileTensor& tensor, const Region& region, std::span<std::byte> dst, std::string_view where) {
  RunReader reader(tensor.fd, dst.data(), where);
  for_each_byte_run(tensor.dtype, tensor.shape, region, where,
                    [&](int64_t begin, int64_t bytes) { reader.add(tensor.offset + begin, bytes); });
  reader.flush();
}

}  // namespace tessera::checkpoint
