#include "bus/registration/local_tensors.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <optional>

#include "base/fail.h"
#include "bus/registration/name_table.h"
#include "bus/registration/plane_memory.h"
#include "layout/job_ranks.h"

namespace tessera::bus {
namespace {

using Extent = std::pair<std::byte*, std::byte*>;  // [first, second)

bool same_place(const LocalTensor& a, const LocalTensor& b) {
  return a.data == b.data && a.dtype == b.dtype && a.array.owned == b.array.owned && a.array.strides == b.array.strides;
}

constexpr size_t kMaxRuns = size_t{1} << 20;

// The bytes of a tensor: runs of `run` bytes, repeated along dims with positive strides, the largest first.
struct Footprint {
  const LocalTensor* tensor = nullptr;
  std::byte* begin = nullptr;
  int64_t run = 0;
  std::vector<MemoryDim> dims;

  explicit Footprint(const LocalTensor& of)
      : tensor(&of), begin(of.data + of.extent().begin), run(std::max(bits_of(of.dtype) / 8, 1)) {
    for (const auto& [count, stride] : memory_dims(of.dtype, of.array.owned.extents(), of.array.strides))
      if (count > 1) dims.push_back({count, std::abs(stride)});
    std::ranges::sort(dims, std::greater<>{}, &MemoryDim::stride);
    for (; !dims.empty() && dims.back().stride == run; dims.pop_back()) run *= dims.back().count;
  }

  // From the first byte to the last one, for one step of the outermost dim.
  int64_t inner_span() const {
    int64_t span = run;
    for (size_t d = 1; d < dims.size(); ++d) span += dims[d].stride * (dims[d].count - 1);
    return span;
  }
  size_t runs() const {
    size_t count = 1;
    for (const MemoryDim& dim : dims)
      if (__builtin_mul_overflow(count, static_cast<size_t>(dim.count), &count)) return SIZE_MAX;
    return count;
  }
  template <typename Visit>  // void(Extent)
  void for_each_run(Visit visit, size_t dim = 0, int64_t offset = 0) const {
    if (dim == dims.size()) return visit(Extent{begin + offset, begin + offset + run});
    for (Index i = 0; i < dims[dim].count; ++i) for_each_run(visit, dim + 1, offset + i * dims[dim].stride);
  }
};

// Whether all have the same step and span at most one: then they overlap in the first step or never.
bool step_together(std::span<const Footprint> cluster) {
  std::byte* begin = cluster.front().begin;
  std::byte* end = begin;
  for (const Footprint& one : cluster) {
    if (one.dims.empty() || one.dims[0].stride != cluster.front().dims[0].stride) return false;
    begin = std::min(begin, one.begin);
    end = std::max(end, one.begin + one.inner_span());
  }
  return end - begin <= cluster.front().dims[0].stride;
}

// Tensors whose extents overlap may still interleave (columns of a fused weight): their runs decide.
void require_disjoint(std::span<const LocalTensor* const> tensors) {
  std::vector<Footprint> cluster;
  cluster.reserve(tensors.size());
  for (const LocalTensor* tensor : tensors) cluster.emplace_back(*tensor);
  while (step_together(cluster))
    for (Footprint& one : cluster) one.dims.erase(one.dims.begin());

  std::vector<std::pair<Extent, const LocalTensor*>> runs;
  for (const Footprint& one : cluster) {
    if (one.runs() > kMaxRuns - std::min(kMaxRuns, runs.size()))
      fail(ErrorCode::kInvalidArgument,
           "tensor {}: it lies in more than {} pieces in memory: give it strides that nest"_message, one.tensor->name,
           kMaxRuns);
    one.for_each_run([&](const Extent& run) { runs.emplace_back(run, one.tensor); });
  }
  std::ranges::sort(runs, {}, [](const auto& run) { return run.first; });
  for (size_t i = 1; i < runs.size(); ++i) {
    if (runs[i].first.first >= runs[i - 1].first.second) continue;
    const LocalTensor& a = *runs[i - 1].second;
    const LocalTensor& b = *runs[i].second;
    if (&a == &b)
      fail(ErrorCode::kInvalidArgument,
           "tensor {}: its strides make elements share memory, which a destination must not"_message, a.name);
    fail(
        ErrorCode::kInvalidArgument,
        "tensors {} and {} overlap in memory at {}: destinations must not overlap, unless they are the same tensor with the same strides"_message,
        a.name, b.name, fmt::ptr(runs[i].first.first));
  }
}

}  // namespace

ByteExtent LocalTensor::extent() const {
  return extent_of(dtype, array.owned.extents(), array.strides);
}

Manifest manifest_of(const Identity& identity, std::span<const TensorSpec> specs, const Layout& fallback) {
  Manifest manifest;
  NameTable names(specs.size());
  manifest.entries.reserve(specs.size());
  const Layout none = fallback.mesh().size() != 0 ? fallback : Layout(Mesh({Axis{"", identity.world}}), {Replicate{}});
  for (const TensorSpec& spec : specs) {
    const auto where = [&] { return fmt::format("tensor {} of {}", spec.name, identity.name()); };
    if (spec.name.empty() || spec.name.size() > kMaxNameBytes)
      fail(ErrorCode::kInvalidArgument, "{}: a name has 1 to {} bytes"_message, where(), kMaxNameBytes);
    if (names.add(spec.name) != manifest.entries.size())
      fail(ErrorCode::kInvalidArgument, "{}: registered twice"_message, where());
    try {
      element_count(spec.shape);
      Layout layout = (spec.layout.mesh().size() == 0 ? none : spec.layout).bind(spec.shape);
      require_ranks_of_job(layout, identity.world);
      const Region owned = layout.owned(spec.shape, identity.rank);
      if (!owned.empty() && spec.data == nullptr)
        fail(ErrorCode::kInvalidArgument, "this rank holds {} elements of it under {}, but gave no memory"_message,
             owned.size(), layout.to_string());
      if (!spec.planes.empty()) {
        const DType codes = require_planes(spec, layout);
        manifest.entries.push_back(
            {spec.name, codes, spec.shape, std::move(layout), spec.source, spec.wire, spec.planes, {}});
        continue;
      }
      if (!owned.empty()) byte_strides(spec.dtype, owned.extents(), spec.strides);
      const std::optional<Format> wire = can_be_quantised(spec.dtype, spec.shape) ? spec.wire : std::nullopt;
      manifest.entries.push_back(
          {spec.name, spec.dtype, spec.shape, std::move(layout), spec.source, wire, {}, spec.fused});
    } catch (const Error& error) {
      throw Error(error.code(), fmt::format("{}: {}", where(), error.what()));
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

// For a tensor that travels transposed.
LocalTensor transposed(LocalTensor tensor) {
  std::vector<IntervalSet> dims(tensor.array.owned.dims().begin(), tensor.array.owned.dims().end());
  std::swap(dims[dims.size() - 2], dims.back());
  tensor.array.owned = Region(std::move(dims));
  std::vector<Index>& strides = tensor.array.strides;
  if (!strides.empty()) std::swap(strides[strides.size() - 2], strides.back());
  return tensor;
}

// This rank's share of a part of a tensor that it has registered; the same memory.
LocalTensor part_of(const Match::Tensor& matched, const Match::Whole& whole, const TensorSpec* spec, Rank rank) {
  const LocalTensor held = local_tensor(matched.source, matched.src_dtype, whole.layout.owned(whole.shape, rank), spec);
  LocalTensor part = local_tensor(matched.name, matched.src_dtype, matched.src.owned(matched.shape, rank), nullptr);
  if (held.empty() || part.array.owned.empty()) return part;
  part.data = held.data;
  const std::vector<Slice> slices = local_slices(whole.layout, whole.shape, whole.slices, rank);
  for (size_t dim = 0; dim < slices.size(); ++dim) {
    const Index stride = held.array.strides[dim];
    part.data += slices[dim].begin * stride;
    if (!slices[dim].dropped) part.array.strides.push_back(slices[dim].step * stride);
  }
  return part;
}

// As it is registered, not transposed.
Match::Tensor upright(Match::Tensor matched) {
  if (!std::exchange(matched.transposed, false)) return matched;
  const int last = static_cast<int>(matched.shape.size()) - 1;
  std::swap(matched.shape[matched.shape.size() - 2], matched.shape.back());
  matched.src = matched.src.transposed(last - 1, last);
  matched.dst = matched.dst.transposed(last - 1, last);
  return matched;
}

// From the column plane where its blocks travel, or where no other plane is there.
LocalTensor encoded_tensor(const Match::Tensor& matched, const TensorSpec* spec, Rank rank) {
  Region travels = matched.src.owned(matched.shape, rank);
  if (spec == nullptr) return local_tensor(matched.name, DType::kU8, Region::none(travels.ndim()), nullptr);
  const Match::Tensor whole = upright(matched);
  const Plane plane = matched.transposed || !spec->planes.row ? Plane::kColumn : Plane::kRow;
  return sent_plane(matched.name, *spec, whole.src.owned(whole.shape, rank), plane, std::move(travels));
}

LocalTensor sent_tensor(const Match::Tensor& matched, const TensorSpec* spec, Rank rank) {
  if (matched.encoded) return encoded_tensor(matched, spec, rank);
  if (matched.transposed) return transposed(sent_tensor(upright(matched), spec, rank));
  return matched.of ? part_of(matched, *matched.of, spec, rank)
                    : local_tensor(matched.name, matched.src_dtype, matched.src.owned(matched.shape, rank), spec);
}

// The plane of its quantised copy that gives the bytes that travel, if there is one.
std::optional<PlaneSource> copied_tensor(const Match::Tensor& matched, const TensorSpec& spec, Rank rank) {
  const QuantizedCopy& copy = *spec.quantized;
  if (matched.wire != copy.format || matched.of || matched.fused || matched.src.has_partial()) return std::nullopt;
  const bool column = matched.transposed || !copy.planes.row;
  const bool travels = matched.transposed || column_is_transposed_row({.format = copy.format});
  if (column && !(copy.planes.column && travels)) return std::nullopt;
  const Match::Tensor whole = upright(matched);
  return copied_plane(spec, whole.src.owned(whole.shape, rank), column ? Plane::kColumn : Plane::kRow,
                      matched.src.owned(matched.shape, rank));
}

// By tensor, whether it is quantised with others.
std::vector<bool> quantised_together(const Match& match) {
  std::vector<bool> together(match.tensors.size());
  for (uint32_t t = 0; t < match.tensors.size(); ++t)
    if (const uint32_t group = match.tensors[t].group; group != t) together[t] = together[group] = true;
  return together;
}

LocalTensor received_tensor(const Match::Tensor& matched, const TensorSpec* spec, Rank rank) {
  const Region owned = matched.dst.owned(matched.shape, rank);
  if (matched.planes.empty()) return local_tensor(matched.name, matched.dst_dtype, owned, spec);
  if (spec == nullptr) return local_tensor(matched.name, DType::kU8, Region::none(owned.ndim()), nullptr);
  if (!matched.transposed) return local_planes(matched.name, *spec, owned, matched.planes);
  const Match::Tensor whole = upright(matched);
  LocalTensor tensor =
      local_planes(matched.name + " (column plane)", *spec, whole.dst.owned(whole.shape, rank), matched.planes);
  tensor.held = owned;
  return tensor;
}

}  // namespace

std::vector<LocalTensor> registered_tensors(const Manifest& manifest, std::span<const TensorSpec> specs, Rank rank) {
  std::vector<LocalTensor> tensors;
  tensors.reserve(specs.size());
  for (size_t i = 0; i < specs.size(); ++i) {
    const ManifestEntry& entry = manifest.entries[i];
    Region owned = entry.layout.owned(entry.shape, rank);
    tensors.push_back(entry.planes.empty() ? local_tensor(entry.name, entry.dtype, std::move(owned), &specs[i])
                                           : local_planes(entry.name, specs[i], std::move(owned), entry.planes));
  }
  return tensors;
}

std::vector<LocalTensor> local_tensors(const Match& match, std::span<const TensorSpec> specs, Rank rank, bool sends,
                                       const CopyIsCurrent& current) {
  NameTable names(specs.size());  // numbers are positions in `specs`
  for (const TensorSpec& spec : specs) names.add(spec.name);
  const std::vector<bool> together = quantised_together(match);
  std::vector<LocalTensor> tensors;
  tensors.reserve(match.tensors.size());
  for (const Match::Tensor& matched : match.tensors) {
    const std::optional<uint32_t> place = names.find(sends ? matched.source : matched.name);
    const TensorSpec* spec = place ? &specs[*place] : nullptr;
    tensors.push_back(sends ? sent_tensor(matched, spec, rank) : received_tensor(matched, spec, rank));
    LocalTensor& tensor = tensors.back();
    if (!sends || !current || tensor.empty() || !spec->quantized || tensor.encoded || together[tensors.size() - 1])
      continue;
    tensor.encoded = copied_tensor(matched, *spec, rank);
    if (tensor.encoded)
      tensor.current = [current, spec = static_cast<size_t>(*place)](uint32_t slot) { return current(spec, slot); };
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
