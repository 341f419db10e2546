#include <algorithm>
#include <memory>
#include <utility>

#include "base/fail.h"
#include "tessera/layout.h"

namespace tessera {

Region::Region(std::vector<IntervalSet> dims) {
  if (!dims.empty()) dims_ = std::make_shared<const std::vector<IntervalSet>>(std::move(dims));
}

bool Region::operator==(const Region& other) const {
  return none_ == other.none_ && (dims_ == other.dims_ || std::ranges::equal(dims(), other.dims()));
}

Region Region::full(std::span<const Index> shape) {
  std::vector<IntervalSet> dims;
  dims.reserve(shape.size());
  for (const Index size : shape) dims.emplace_back(Interval{0, size});
  return Region(std::move(dims));
}

Region Region::none(int ndim) {
  Region region(std::vector<IntervalSet>(static_cast<size_t>(ndim)));
  region.none_ = ndim == 0;
  return region;
}

bool Region::empty() const {
  return none_ || std::ranges::any_of(dims(), &IntervalSet::empty);
}

Index Region::size() const {
  if (empty()) return 0;
  Index product = 1;
  for (const IntervalSet& set : dims()) product *= set.size();
  return product;
}

Shape Region::extents() const {
  Shape shape;
  shape.reserve(dims().size());
  for (const IntervalSet& set : dims()) shape.push_back(set.size());
  return shape;
}

Region Region::intersect(const Region& other) const {
  TESSERA_CHECK_EQ(ndim(), other.ndim());
  if (!dims_) return none_ ? *this : other;
  std::vector<IntervalSet> both;
  both.reserve(dims_->size());
  for (int d = 0; d < ndim(); ++d) both.push_back(dim(d).intersect(other.dim(d)));
  return Region(std::move(both));
}

std::string Region::to_string() const {
  if (!dims_) return none_ ? "none" : "scalar";
  fmt::memory_buffer out;
  for (const IntervalSet& set : dims()) {
    out.push_back('[');
    const char* separator = "";
    for (const Interval& interval : set.intervals()) {
      fmt::format_to(std::back_inserter(out), "{}{}:{}", separator, interval.begin, interval.end);
      separator = ",";
    }
    out.push_back(']');
  }
  return fmt::to_string(out);
}

}  // namespace tessera
