#include <algorithm>

#include "base/fail.h"
#include "layout/text_reader.h"
#include "tessera/layout.h"

namespace tessera {

Index element_count(std::span<const Index> shape) {
  if (shape.size() > kMaxDims) {
    fail(ErrorCode::kInvalidArgument, "a shape of {} dims: at most {} are supported"_message, shape.size(), kMaxDims);
  }
  Index product = 1;
  bool holds_zero = false;
  for (const Index size : shape) {
    if (size < 0)
      fail(ErrorCode::kInvalidArgument, "shape {}: the size {} is negative"_message, to_string_shape(shape), size);
    holds_zero |= size == 0;
    if (size > 1 && product > kMaxElements / size) {
      fail(ErrorCode::kInvalidArgument, "shape {}: more than 2^62 elements"_message, to_string_shape(shape));
    }
    product *= std::max<Index>(size, 1);
  }
  return holds_zero ? 0 : product;
}

std::string to_string_shape(std::span<const Index> shape) {
  return shape.empty() ? "scalar" : fmt::format("{}", fmt::join(shape, "x"));
}

Shape parse_shape(std::string_view text) {
  if (text == "scalar") return {};
  TextReader reader("shape", text);
  Shape shape;
  do {
    if (shape.size() == kMaxDims) reader.fail_whole(fmt::format("more than {} dims", kMaxDims));
    shape.push_back(reader.number(0, kMaxElements, "a size (\"4096x4096\", or \"scalar\" for no dims)"));
  } while (reader.accept("x"));
  reader.expect_end("\"x\" or the end");
  element_count(shape);
  return shape;
}

}  // namespace tessera
