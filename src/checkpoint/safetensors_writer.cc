#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "base/fail.h"
#include "checkpoint/atomic_file.h"
#include "checkpoint/safetensors_header.h"
#include "checkpoint/shown.h"
#include "tessera/checkpoint.h"

namespace tessera {
namespace {

// The order of dtypes in the reference implementation: none needs more alignment than those before it.
constexpr std::array kOrder{DType::kU64,    DType::kI64,    DType::kF64, DType::kC64, DType::kF32, DType::kU32,
                            DType::kI32,    DType::kBF16,   DType::kF16, DType::kU16, DType::kI16, DType::kF8E8M0,
                            DType::kF8E4M3, DType::kF8E5M2, DType::kI8,  DType::kU8,  DType::kF4,  DType::kBool};
static_assert(kOrder.size() == static_cast<size_t>(kLastDType) + 1);

bool comes_before(const TensorView& a, const TensorView& b) {
  const auto place = [](DType dtype) { return std::ranges::find(kOrder, dtype) - kOrder.begin(); };
  return std::pair(place(a.dtype), std::string_view(a.name)) < std::pair(place(b.dtype), std::string_view(b.name));
}

void check_tensors(const std::vector<TensorView>& tensors, const std::string& path) {
  std::vector<std::string_view> names;
  for (const TensorView& tensor : tensors) {
    if (element_count(tensor.shape) * bits_of(tensor.dtype) % 8 != 0)
      fail(ErrorCode::kInvalidArgument, "{}: tensor {}: shape {} of {} ends inside a byte"_message, path,
           checkpoint::shown(tensor.name), to_string_shape(tensor.shape), to_string(tensor.dtype));
    names.push_back(tensor.name);
  }
  std::ranges::sort(names);
  if (const auto twice = std::ranges::adjacent_find(names); twice != names.end())
    fail(ErrorCode::kInvalidArgument, "{}: tensor {} is given twice"_message, path, checkpoint::shown(*twice));
  if (std::ranges::binary_search(names, checkpoint::kMetadataKey))
    fail(ErrorCode::kInvalidArgument, "{}: a tensor cannot be called {}"_message, path, checkpoint::kMetadataKey);
}

}  // namespace

int64_t write_safetensors(const std::filesystem::path& path, std::span<const TensorView> tensors,
                          const std::map<std::string, std::string>& metadata) {
  std::vector<TensorView> ordered(tensors.begin(), tensors.end());
  std::ranges::sort(ordered, comes_before);
  check_tensors(ordered, path.string());

  const std::string header = checkpoint::format_header(ordered, metadata);
  const uint64_t header_bytes = header.size();
  if (header_bytes > checkpoint::kMaxHeaderBytes)
    fail(ErrorCode::kInvalidArgument, "{}: a header of {} bytes, more than the {} that readers take"_message,
         path.string(), header_bytes, checkpoint::kMaxHeaderBytes);
  int64_t bytes = static_cast<int64_t>(sizeof(header_bytes) + header_bytes);
  for (const TensorView& tensor : ordered) bytes += bytes_of(tensor.dtype, element_count(tensor.shape));

  checkpoint::AtomicFile file(path, bytes);
  file.append(std::as_bytes(std::span(&header_bytes, 1)));
  file.append(std::as_bytes(std::span(header)));
  for (const TensorView& tensor : ordered)
    file.append({tensor.data, static_cast<size_t>(bytes_of(tensor.dtype, element_count(tensor.shape)))});
  file.commit();
  return bytes;
}

}  // namespace tessera
