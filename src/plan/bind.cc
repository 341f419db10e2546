#include "plan/bind.h"

#include "base/fail.h"
#include "codec/simd/reduce.h"

namespace tessera::plan {
namespace {

constexpr int64_t kMaxBytes = int64_t{1} << 56;  // over all destinations: sums of them fit into 64 bits

Layout bind_side(std::string_view side, const Layout& layout, const Shape& shape) {
  if (layout.mesh().size() == 0) fail(ErrorCode::kInvalidArgument, "the {} layout has no ranks"_message, side);
  try {
    return layout.bind(shape);
  } catch (const Error& error) {
    fail(error.code(), "{}: {}"_message, side, error.what());
  }
}

}  // namespace

BoundLayouts bind(const TensorMeta& meta, const Layout& src, const Layout& dst) {
  BoundLayouts bound{bind_side("source", src, meta.shape), bind_side("destination", dst, meta.shape)};
  if (dst.has_partial())
    fail(ErrorCode::kInvalidArgument,
         "destination: layout \"{}\" is Partial, but a transfer cannot choose how to split a value into terms: "
         "take R, "
         "or a Shard"_message,
         dst.to_string());
  if (const auto op = src.partial_op(); op && !reducible(*op, meta.dtype))
    fail(ErrorCode::kInvalidArgument,
         "source: layout \"{}\": {} cannot be reduced by {}: floats of 16 bits and more take every op, integers "
         "all except avg, "
         "c64 sum, avg and product"_message,
         src.to_string(), to_string(meta.dtype), to_string(*op));
  const Index elements = element_count(meta.shape);
  if (elements > kMaxBytes / (8 * dst.mesh().size()))
    fail(ErrorCode::kInvalidArgument, "shape {} on {} destinations is more than 2^56 bytes"_message,
         to_string_shape(meta.shape), dst.mesh().size());
  return bound;
}

}  // namespace tessera::plan
