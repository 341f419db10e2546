// The contiguous runs of a region in a row-major tensor.
#pragma once

#include <span>
#include <string_view>

#include "base/fail.h"
#include "tessera/dtype.h"
#include "tessera/layout.h"

namespace tessera::checkpoint {

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

// The same in bytes: visit(first byte, bytes). Throws Error(kInvalidArgument), whose message begins with `where`, for
// an F4 run that does not begin and end at a byte.
template <typename Visit>
void for_each_byte_run(DType dtype, std::span<const Index> shape, const Region& region, std::string_view where,
                       Visit visit) {
  const int64_t bits = bits_of(dtype);
  for_each_run(shape, region, [&](Index first, Index elements) {
    if (bits < 8 && (first * bits % 8 != 0 || elements * bits % 8 != 0))
      fail(ErrorCode::kInvalidArgument,
           "{}: elements {} to {} of {} would be cut inside a byte: choose even bounds"_message, where, first,
           first + elements, to_string(dtype));
    visit(first * bits / 8, elements * bits / 8);
  });
}

}  // namespace tessera::checkpoint
