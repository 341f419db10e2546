#include "checkpoint/strided_read.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "base/fail.h"

namespace tessera::checkpoint {
namespace {

// The most that one pread gathers while runs are at most kMaxGap apart: a window stays in the L2 cache, and copying a
// gap is cheaper than a system call.
constexpr int64_t kWindowBytes = 512 << 10;
constexpr int64_t kMaxGap = 4 << 10;

// Calls visit(first element, elements) for every maximal contiguous run of `region`, in row-major order.
template <typename Visit>
void for_each_run(std::span<const Index> shape, const Region& region, Visit visit) {
  if (region.empty()) return;
  // Dims after `cut` are owned whole; `cut` itself in intervals, each of which is a run of `interval * inner`.
  int cut = region.ndim() - 1;
  Index inner = 1;
  for (; cut > 0 && region.dim(cut).size() == shape[static_cast<size_t>(cut)]; --cut)
    inner *= shape[static_cast<size_t>(cut)];
  if (cut < 0) return visit(Index{0}, Index{1});

  Index run_begin = 0;
  Index run_end = 0;
  const auto add = [&](Index begin, Index end) {
    if (begin != run_end) {
      if (run_begin != run_end) visit(run_begin, run_end - run_begin);
      run_begin = begin;
    }
    run_end = end;
  };
  const auto walk = [&](auto& self, int dim, Index base) -> void {  // at most kMaxDims deep
    const Index size = shape[static_cast<size_t>(dim)];
    for (const Interval& interval : region.dim(dim).intervals()) {
      if (dim == cut) {
        add((base * size + interval.begin) * inner, (base * size + interval.end) * inner);
        continue;
      }
      for (Index i = interval.begin; i < interval.end; ++i) self(self, dim + 1, base * size + i);
    }
  };
  walk(walk, 0, 0);
  visit(run_begin, run_end - run_begin);
}

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
  const int64_t bits = bits_of(tensor.dtype);
  RunReader reader(tensor.fd, dst.data(), where);
  for_each_run(tensor.shape, region, [&](Index first, Index elements) {
    if (bits < 8 && (first * bits % 8 != 0 || elements * bits % 8 != 0))
      fail(ErrorCode::kInvalidArgument,
           "{}: elements {} to {} of {} would be cut inside a byte: choose even bounds"_message, where, first,
           first + elements, to_string(tensor.dtype));
    reader.add(tensor.offset + first * bits / 8, elements * bits / 8);
  });
  reader.flush();
}

}  // namespace tessera::checkpoint
