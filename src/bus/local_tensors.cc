#include "bus/local_tensors.h"

#include <algorithm>
#include <numeric>
#include <unordered_map>
#include <unordered_set>

#include "base/fail.h"

namespace tessera::bus {
namespace {

using Extent = std::pair<std::byte*, std::byte*>;  // [first, second)

// The contiguous runs of a strided tensor, ascending within themselves; adjacent ones merged.
std::vector<Extent> runs_of(const LocalTensor& tensor) {
  const Shape extents = tensor.array.owned.extents();
  const std::vector<Index>& strides = tensor.array.strides;
  const int64_t bits = bits_of(tensor.dtype);
  // From the innermost dim outwards, as long as memory is contiguous.
  int64_t run = std::max<int64_t>(bits / 8, 1);
  int outer = static_cast<int>(extents.size());
  while (outer > 0 && strides[static_cast<size_t>(outer) - 1] == run) {
    const Index extent = extents[static_cast<size_t>(outer) - 1];
    run *= bits < 8 && outer == static_cast<int>(extents.size()) ? (extent + 1) / 2 : extent;
    --outer;
  }
  std::vector<Extent> runs;
  std::vector<Index> at(static_cast<size_t>(outer), 0);
  while (true) {
    std::byte* begin = tensor.data;
    for (size_t d = 0; d < at.size(); ++d) begin += at[d] * strides[d];
    runs.emplace_back(begin, begin + run);
    int d = outer - 1;
    for (; d >= 0; --d) {
      if (++at[static_cast<size_t>(d)] < extents[static_cast<size_t>(d)]) break;
      at[static_cast<size_t>(d)] = 0;
    }
    if (d < 0) return runs;
  }
}

bool same_place(const LocalTensor& a, const LocalTensor& b) {
  return a.data == b.data && a.dtype == b.dtype && a.array.owned == b.array.owned && a.array.strides == b.array.strides;
}

// Whether each dim steps over all that the dims of smaller stride span: no two elements can then meet.
bool nested(const LocalTensor& tensor) {
  const Shape extents = tensor.array.owned.extents();
  std::vector<std::pair<Index, Index>> dims;  // |stride|, extent
  for (size_t d = 0; d < extents.size(); ++d)
    if (extents[d] > 1) dims.emplace_back(std::abs(tensor.array.strides[d]), extents[d]);
  std::ranges::sort(dims);
  Index span = std::max<Index>(bits_of(tensor.dtype) / 8, 1);
  for (const auto& [stride, extent] : dims) {
    if (bits_of(tensor.dtype) < 8 && &dims.front().second == &extent) {  // two elements a byte
      span = (extent + 1) / 2;
      continue;
    }
    if (stride < span) return false;
    span += stride * (extent - 1);
  }
  return true;
}

// Tensors whose extents touch each other may still interleave (columns of a fused weight): their runs decide.
void require_disjoint(std::span<const LocalTensor* const> cluster) {
  std::vector<std::pair<Extent, const LocalTensor*>> runs;
  if (cluster.size() == 1 && nested(*cluster.front())) return;
  for (const LocalTensor* tensor : cluster)
    for (const Extent& run : runs_of(*tensor)) runs.emplace_back(run, tensor);
  std::ranges::sort(runs, {}, [](const auto& run) { return run.first; });
  for (size_t i = 1; i < runs.size(); ++i) {
    if (runs[i].first.first >= runs[i - 1].first.second) continue;
    const LocalTensor& a = *runs[i - 1].second;
    const LocalTensor& b = *runs[i].second;
    if (&a == &b)
      fail(ErrorCode::kInvalidArgument,
           "tensor {}: its strides make elements share memory, which a destination must not", a.name);
    fail(ErrorCode::kInvalidArgument,
         "tensors {} and {} overlap in memory at {}: destinations must be apart, or the same tensor to the last stride",
         a.name, b.name, fmt::ptr(runs[i].first.first));
  }
}

}  // namespace

ByteExtent LocalTensor::extent() const {
  return extent_of(dtype, array.owned.extents(), array.strides);
}

Manifest manifest_of(const Identity& identity, std::span<const TensorSpec> specs) {
  Manifest manifest;
  std::unordered_set<std::string_view> names;
  const Layout everywhere(Mesh({Axis{"", identity.world}}), {Replicate{}});
  for (const TensorSpec& spec : specs) {
    const std::string where = fmt::format("tensor {} of {}", spec.name, identity.name());
    if (spec.name.empty() || spec.name.size() > kMaxNameBytes)
      fail(ErrorCode::kInvalidArgument, "{}: a name has 1 to {} bytes", where, kMaxNameBytes);
    if (!names.insert(spec.name).second) fail(ErrorCode::kInvalidArgument, "{}: registered twice", where);
    try {
      element_count(spec.shape);
      Layout layout = (spec.layout.mesh().size() == 0 ? everywhere : spec.layout).bind(spec.shape);
      for (const Rank rank : layout.mesh().ranks())
        if (rank >= identity.world)
          fail(ErrorCode::kInvalidArgument, "layout {} names rank {}, the job has {}", layout.to_string(), rank,
               identity.world);
      const Region owned = layout.owned(spec.shape, identity.rank);
      if (!owned.empty() && spec.data == nullptr)
        fail(ErrorCode::kInvalidArgument, "this rank holds {} elements of it under {}, but gave no memory",
             owned.size(), layout.to_string());
      if (!owned.empty()) byte_strides(spec.dtype, owned.extents(), spec.strides);
      manifest.entries.push_back({spec.name, spec.dtype, spec.shape, std::move(layout)});
    } catch (const Error& error) {
      throw Error(error.code(), fmt::format("{}: {}", where, error.what()));
    }
  }
  return manifest;
}

namespace {

LocalTensor local_tensor(const std::string& name, DType dtype, Region owned, const TensorSpec* spec) {
  LocalTensor tensor{
      .name = name, .dtype = dtype, .array = {.owned = std::move(owned), .strides = {}}, .data = nullptr};
  if (spec == nullptr || tensor.array.owned.empty()) return tensor;
  tensor.data = static_cast<std::byte*>(spec->data);
  tensor.array.strides = byte_strides(dtype, tensor.array.owned.extents(), spec->strides);
  return tensor;
}

}  // namespace

std::vector<LocalTensor> registered_tensors(const Manifest& manifest, std::span<const TensorSpec> specs, Rank rank) {
  std::vector<LocalTensor> tensors;
  for (size_t i = 0; i < specs.size(); ++i) {
    const ManifestEntry& entry = manifest.entries[i];
    tensors.push_back(local_tensor(entry.name, entry.dtype, entry.layout.owned(entry.shape, rank), &specs[i]));
  }
  return tensors;
}

std::vector<LocalTensor> local_tensors(const Match& match, std::span<const TensorSpec> specs, Rank rank, bool sends) {
  std::unordered_map<std::string_view, const TensorSpec*> by_name;
  for (const TensorSpec& spec : specs) by_name.emplace(spec.name, &spec);
  std::vector<LocalTensor> tensors;
  tensors.reserve(match.tensors.size());
  for (const Match::Tensor& matched : match.tensors) {
    const auto it = by_name.find(matched.name);
    tensors.push_back(local_tensor(matched.name, sends ? matched.src_dtype : matched.dst_dtype,
                                   (sends ? matched.src : matched.dst).owned(matched.shape, rank),
                                   it == by_name.end() ? nullptr : it->second));
  }
  return tensors;
}

std::vector<uint32_t> find_ties(std::span<const LocalTensor> tensors) {
  std::vector<uint32_t> first(tensors.size());
  std::iota(first.begin(), first.end(), 0u);
  std::vector<std::pair<Extent, uint32_t>> extents;
  for (uint32_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].empty()) continue;
    const ByteExtent extent = tensors[i].extent();
    extents.push_back({{tensors[i].data + extent.begin, tensors[i].data + extent.end}, i});
  }
  std::ranges::sort(extents);
  std::vector<const LocalTensor*> cluster;  // distinct tensors whose extents are connected
  std::byte* end = nullptr;
  for (const auto& [extent, index] : extents) {
    if (extent.first >= end && !cluster.empty()) {
      require_disjoint(cluster);
      cluster.clear();
    }
    end = std::max(end, extent.second);
    const auto tied =
        std::ranges::find_if(cluster, [&](const LocalTensor* other) { return same_place(*other, tensors[index]); });
    if (tied != cluster.end()) {
      const auto other = static_cast<uint32_t>(*tied - tensors.data());
      first[index] = other;
    } else {
      cluster.push_back(&tensors[index]);
    }
  }
  if (!cluster.empty()) require_disjoint(cluster);
  return first;
}

}  // namespace tessera::bus
