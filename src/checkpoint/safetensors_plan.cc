#include "checkpoint/safetensors_plan.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/fail.h"
#include "checkpoint/safetensors_header.h"
#include "checkpoint/shown.h"

namespace tessera::checkpoint {
namespace {

// The order of dtypes in the reference implementation: none needs more alignment than those before it.
constexpr std::array kOrder{DType::kU64,    DType::kI64,    DType::kF64, DType::kC64, DType::kF32, DType::kU32,
                            DType::kI32,    DType::kBF16,   DType::kF16, DType::kU16, DType::kI16, DType::kF8E8M0,
                            DType::kF8E4M3, DType::kF8E5M2, DType::kI8,  DType::kU8,  DType::kF4,  DType::kBool};
static_assert(kOrder.size() == static_cast<size_t>(kLastDType) + 1);

bool comes_before(const TensorInfo& a, const TensorInfo& b) {
  const auto place = [](DType dtype) { return std::ranges::find(kOrder, dtype) - kOrder.begin(); };
  return std::pair(place(a.dtype), std::string_view(a.name)) < std::pair(place(b.dtype), std::string_view(b.name));
}

void check_tensors(const std::vector<TensorInfo>& tensors, std::string_view path) {
  std::vector<std::string_view> names;
  for (const TensorInfo& tensor : tensors) {
    if (element_count(tensor.shape) * bits_of(tensor.dtype) % 8 != 0)
      fail(ErrorCode::kInvalidArgument, "{}: tensor {}: shape {} of {} ends inside a byte"_message, path,
           shown(tensor.name), to_string_shape(tensor.shape), to_string(tensor.dtype));
    names.push_back(tensor.name);
  }
  std::ranges::sort(names);
  if (const auto twice = std::ranges::adjacent_find(names); twice != names.end())
    fail(ErrorCode::kInvalidArgument, "{}: tensor {} is given twice"_message, path, shown(*twice));
  if (std::ranges::binary_search(names, kMetadataKey))
    fail(ErrorCode::kInvalidArgument, "{}: a tensor cannot be called {}"_message, path, kMetadataKey);
}

}  // namespace

FilePlan plan_file(std::span<const TensorInfo> tensors, const std::map<std::string, std::string>& metadata,
                   std::string_view path) {
  FilePlan plan{.head = {}, .tensors = {tensors.begin(), tensors.end()}, .offsets = {}};
  std::ranges::sort(plan.tensors, comes_before);
  check_tensors(plan.tensors, path);
  const std::string header = format_header(plan.tensors, metadata);
  const uint64_t header_bytes = header.size();
  if (header_bytes > kMaxHeaderBytes)
    fail(ErrorCode::kInvalidArgument, "{}: a header of {} bytes, more than the {} that readers take"_message, path,
         header_bytes, kMaxHeaderBytes);
  plan.head.assign(reinterpret_cast<const char*>(&header_bytes), sizeof(header_bytes));
  plan.head += header;
  plan.bytes = static_cast<int64_t>(plan.head.size());
  for (const TensorInfo& tensor : plan.tensors) {
    plan.offsets.push_back(plan.bytes);
    plan.bytes += bytes_of(tensor.dtype, element_count(tensor.shape));
  }
  return plan;
}

}  // namespace tessera::checkpoint
