#include "checkpoint/region_checks.h"

#include "base/fail.h"

namespace tessera::checkpoint {

void require_inside(const TensorInfo& tensor, const Region& region, std::string_view where) {
  bool inside = region.ndim() == static_cast<int>(tensor.shape.size());
  for (int d = 0; inside && d < region.ndim(); ++d) {
    const auto intervals = region.dim(d).intervals();
    inside = intervals.empty() ||
             (intervals.front().begin >= 0 && intervals.back().end <= tensor.shape[static_cast<size_t>(d)]);
  }
  if (!inside)
    fail(ErrorCode::kInvalidArgument, "{}: slice {} lies outside its shape {}"_message, where, region.to_string(),
         to_string_shape(tensor.shape));
  if (region.size() * bits_of(tensor.dtype) % 8 != 0)
    fail(ErrorCode::kInvalidArgument, "{}: slice {} of {} would be cut inside a byte: choose even bounds"_message,
         where, region.to_string(), to_string(tensor.dtype));
}

}  // namespace tessera::checkpoint
