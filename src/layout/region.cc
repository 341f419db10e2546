#include <algorithm>

#include "base/fail.h"
#include "tessera/layout.h"

namespace tessera {

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
  return none_ || std::any_of(dims_.begin(), dims_.end(), [](const IntervalSet& set) { return set.empty(); });
}

Index Region::size() const {
  if (empty()) return 0;
  Index product = 1;
  for (const IntervalSet& set : dims_) product *= set.size();
  return product;
}

Shape Region::extents() const {
  Shape shape;
  shape.reserve(dims_.size());
  for (const IntervalSet& set : dims_) shape.push_back(set.size());
  return shape;
}

Region Region::intersect(const Region& other) const {
  TESSERA_CHECK_EQ(ndim(), other.ndim());
  if (dims_.empty()) return none_ ? *this : other;
  std::vector<IntervalSet> dims;
  dims.reserve(dims_.size());
  for (size_t d = 0; d < dims_.size(); ++d) dims.push_back(dims_[d].intersect(other.dims_[d]));
  return Region(std::move(dims));
}

std::string Region::to_string() const {
  if (dims_.empty()) return none_ ? "none" : "scalar";
  fmt::memory_buffer out;
  for (const IntervalSet& set : dims_) {
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
