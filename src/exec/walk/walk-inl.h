// The part of walk.h that callers inline.
#pragma once

#include <algorithm>

#include "exec/walk/walk.h"

namespace tessera {

inline void add_steps(Offsets& offset, const Offsets& step, int64_t count) {
  for (size_t array = 0; array < kArrays; ++array) offset[array] += step[array] * count;
}

inline const Walk::Run& Walk::run_of(const Level& level, int64_t step) const {
  const Run* first = runs_.data() + level.first_run;
  if (level.runs == 1) return *first;
  return *(std::upper_bound(first, first + level.runs, step, [](int64_t s, const Run& run) { return s < run.first; }) -
           1);
}

// Atoms [first, last) of one row-product: the runs of the last level; equal and evenly spaced runs form one block.
template <typename Visit>
void Walk::visit_row(const Offsets& base, int64_t first, int64_t last, Visit& visit) const {
  const Level& level = levels_.back();
  const Run* const end = runs_.data() + level.first_run + level.runs;
  for (const Run* run = &run_of(level, first); first < last; ++run) {
    const int64_t skipped = first - run->first;
    Block block{.offset = base, .row_atoms = std::min(run->count - skipped, last - first), .rows = 1};
    add_steps(block.offset, run->offset, 1);
    add_steps(block.offset, level.stride, skipped);
    first += block.row_atoms;
    if (block.row_atoms == run->count && run + 1 != end) {
      const Run* const head = run;
      for (size_t array = 0; array < kArrays; ++array)
        block.row_step[array] = run[1].offset[array] - run->offset[array];
      while (run + 1 != end && run[1].count == head->count && last - first >= head->count) {
        Offsets expected = run->offset;
        add_steps(expected, block.row_step, 1);
        if (run[1].offset != expected) break;
        ++run;
        ++block.rows;
        first += head->count;
      }
    }
    visit(static_cast<const Block&>(block));
  }
}

template <typename Visit>
void Walk::visit(int64_t first, int64_t last, Visit&& visit) const {
  if (first >= last) return;
  if (levels_.empty()) {
    visit(Block{.offset = base_, .row_atoms = 1, .rows = 1});
    return;
  }
  const Level& inner = levels_.back();
  const size_t outer_levels = levels_.size() - 1;
  while (first < last) {
    int64_t outer = first / inner.count;
    const int64_t within = first - outer * inner.count;
    Offsets offset = base_;
    int64_t rows_left = 1;  // in the run of the level above the rows
    for (size_t l = outer_levels; l-- > 0;) {
      const Level& level = levels_[l];
      const int64_t step = outer % level.count;
      outer /= level.count;
      const Run& run = run_of(level, step);
      add_steps(offset, run.offset, 1);
      add_steps(offset, level.stride, step - run.first);
      if (l + 1 == outer_levels) rows_left = run.first + run.count - step;
    }
    if (inner.runs > 1 || within != 0 || last - first < inner.count) {
      const int64_t count = std::min(inner.count - within, last - first);
      visit_row(offset, within, within + count, visit);
      first += count;
      continue;
    }
    Block block{.offset = offset, .row_atoms = inner.count, .rows = std::min(rows_left, (last - first) / inner.count)};
    add_steps(block.offset, runs_[inner.first_run].offset, 1);
    if (outer_levels > 0) block.row_step = levels_[outer_levels - 1].stride;
    first += block.rows * inner.count;
    visit(static_cast<const Block&>(block));
  }
}

}  // namespace tessera
