#include "exec/walk/walk.h"

#include <iterator>
#include <utility>

#include "base/fail.h"

namespace tessera {
namespace {

constexpr int64_t kMaxOffset = int64_t{1} << 58;
constexpr int64_t kFewRows = 16;  // a block of fewer rows is not worth its setup

int64_t checked_product(int64_t a, int64_t b) {
  int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product) || product > kMaxOffset || product < -kMaxOffset)
    fail(ErrorCode::kInvalidArgument, "a tensor whose stride is {} bytes reaches beyond any memory at index {}"_message,
         b, a);
  return product;
}

bool is_multiple(const Offsets& outer, const Offsets& inner, int64_t count) {
  for (size_t array = 0; array < kArrays; ++array)
    if (outer[array] != inner[array] * count) return false;
  return true;
}

Offsets difference(const Offsets& a, const Offsets& b) {
  Offsets result{};
  for (size_t array = 0; array < kArrays; ++array) result[array] = a[array] - b[array];
  return result;
}

}  // namespace

struct Walk::Draft {
  std::vector<Run> runs;  // `first` is set by adopt()
  Offsets stride{};

  int64_t count() const {
    int64_t sum = 0;
    for (const Run& run : runs) sum += run.count;
    return sum;
  }
};

Walk::Walk(std::span<const IntervalSet> region, std::span<const std::array<DimView, kArrays>> dims,
           const Offsets& atom_bytes, Order order) {
  std::vector<Draft> drafts;
  atoms_ = 1;
  for (size_t d = 0; d < region.size(); ++d) {
    Draft draft;
    for (const Interval& interval : region[d].intervals()) {
      Run run{.count = interval.size()};
      for (size_t array = 0; array < kArrays; ++array) {
        const DimView& view = dims[d][array];
        if (view.owned == nullptr) continue;
        draft.stride[array] = view.stride;
        run.offset[array] = checked_product(view.owned->position_of(interval.begin), view.stride);
        checked_product(interval.size(), view.stride);
      }
      draft.runs.push_back(run);
    }
    const int64_t count = draft.count();
    atoms_ *= count;
    if (count == 0) return;
    if (count == 1) {
      add_steps(base_, draft.runs[0].offset, 1);
      continue;
    }
    drafts.push_back(std::move(draft));
  }
  collapse(drafts);
  fold(drafts);
  collapse(drafts);
  if (!drafts.empty() && drafts.back().stride != atom_bytes)
    drafts.push_back({.runs = {Run{.count = 1}}, .stride = atom_bytes});
  if (order == Order::kFree) prefer_long_rows(drafts);
  adopt(drafts);
}

// Joins runs that are contiguous in every array.
void Walk::merge_runs(Draft& draft) {
  std::vector<Run> merged;
  for (const Run& run : draft.runs) {
    if (!merged.empty()) {
      Offsets next = merged.back().offset;
      add_steps(next, draft.stride, merged.back().count);
      if (next == run.offset) {
        merged.back().count += run.count;
        continue;
      }
    }
    merged.push_back(run);
  }
  draft.runs = std::move(merged);
}

// Merges two neighbouring levels if the outer one merely continues the inner one.
void Walk::collapse(std::vector<Draft>& drafts) {
  for (size_t d = drafts.size(); d-- > 0;) {
    merge_runs(drafts[d]);
    if (d + 1 == drafts.size()) continue;
    const Draft& inner = drafts[d + 1];
    if (inner.runs.size() != 1 || !is_multiple(drafts[d].stride, inner.stride, inner.runs[0].count)) continue;
    for (Run& run : drafts[d].runs) {
      run.count *= inner.runs[0].count;
      add_steps(run.offset, inner.runs[0].offset, 1);
    }
    drafts[d].stride = inner.stride;
    drafts.erase(drafts.begin() + static_cast<std::ptrdiff_t>(d) + 1);
    merge_runs(drafts[d]);
  }
}

// Splits a level into two if its runs are equal and evenly spaced.
void Walk::fold(std::vector<Draft>& drafts) {
  for (size_t d = drafts.size(); d-- > 0;) {
    const std::vector<Run>& runs = drafts[d].runs;
    if (runs.size() < 2) continue;
    const Offsets spacing = difference(runs[1].offset, runs[0].offset);
    bool regular = true;
    for (size_t r = 1; r < runs.size() && regular; ++r)
      regular = runs[r].count == runs[0].count && difference(runs[r].offset, runs[r - 1].offset) == spacing;
    if (!regular) continue;
    Draft outer{.runs = {Run{.count = static_cast<int64_t>(runs.size()), .offset = runs[0].offset}}, .stride = spacing};
    if (runs[0].count == 1) {
      drafts[d] = std::move(outer);
      continue;
    }
    drafts[d].runs = {Run{.count = runs[0].count}};
    drafts.insert(drafts.begin() + static_cast<std::ptrdiff_t>(d), std::move(outer));
  }
}

// The level above the rows should be long, since a block is a stretch of it.
void Walk::prefer_long_rows(std::vector<Draft>& drafts) {
  if (drafts.size() < 3) return;
  const auto longest = [](const Draft& draft) {
    int64_t most = 0;
    for (const Run& run : draft.runs) most = std::max(most, run.count);
    return most;
  };
  const auto above = drafts.end() - 2;
  if (longest(*above) >= kFewRows) return;
  const auto best = std::max_element(drafts.begin(), drafts.end() - 1,
                                     [&](const Draft& a, const Draft& b) { return longest(a) < longest(b); });
  std::iter_swap(best, above);
}

void Walk::adopt(const std::vector<Draft>& drafts) {
  for (const Draft& draft : drafts) {
    Level level{.first_run = static_cast<uint32_t>(runs_.size()),
                .runs = static_cast<uint32_t>(draft.runs.size()),
                .stride = draft.stride};
    for (Run run : draft.runs) {
      run.first = level.count;
      level.count += run.count;
      level.longest = std::max(level.longest, run.count);
      runs_.push_back(run);
    }
    levels_.push_back(level);
  }
  levels_.shrink_to_fit();
  runs_.shrink_to_fit();
}

ByteExtent Walk::extent(Array array, int64_t atom_bytes) const {
  if (atoms_ == 0) return {};
  int64_t low = base_[array];
  int64_t high = base_[array];
  for (const Level& level : levels_) {
    int64_t level_low = INT64_MAX;
    int64_t level_high = INT64_MIN;
    for (uint32_t r = level.first_run; r < level.first_run + level.runs; ++r) {
      const int64_t begin = runs_[r].offset[array];
      const int64_t end = begin + (runs_[r].count - 1) * level.stride[array];
      level_low = std::min({level_low, begin, end});
      level_high = std::max({level_high, begin, end});
    }
    low += level_low;
    high += level_high;
  }
  return {.begin = low, .end = high + atom_bytes};
}

size_t Walk::memory_bytes() const {
  return sizeof(*this) + levels_.capacity() * sizeof(Level) + runs_.capacity() * sizeof(Run);
}

}  // namespace tessera
