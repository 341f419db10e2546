#include "tests/support/random_case.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "bus/registration/plane_memory.h"
#include "codec/simd/cast.h"
#include "layout/random_layout.h"
#include "tessera/plan.h"
#include "tests/support/brute_values.h"

namespace tessera::test {
namespace {

template <typename T>
T pick(std::mt19937_64& random, const std::vector<T>& from) {
  return from[random() % from.size()];
}

int between(std::mt19937_64& random, int low, int high) {
  return low + static_cast<int>(random() % static_cast<uint64_t>(high - low + 1));
}

// The reduction of one in four tensors.
std::optional<ReduceOp> random_op(std::mt19937_64& random, const std::vector<ReduceOp>& ops) {
  return random() % 4 == 0 ? std::optional(pick(random, ops)) : std::nullopt;
}

// Over some of a job's ranks. Partial axes are reduced by `op`; without one there are none.
Layout random_layout(std::mt19937_64& random, const Shape& shape, int world, std::optional<ReduceOp> op = {}) {
  const std::vector<ReduceOp> ops = op ? std::vector{*op} : std::vector<ReduceOp>();
  return RandomLayouts(random(), {.max_ranks = world, .highest_rank = world - 1, .ops = ops}).layout(shape);
}

// Calls `visit(global indices, position among the owned elements)` for every element that `region` holds.
template <typename Visit>
void for_each_element(const Shape& shape, const Region& region, const Visit& visit) {
  if (region.empty()) return;
  std::vector<std::vector<Index>> indices(shape.size());
  for (size_t d = 0; d < shape.size(); ++d)
    for (const Interval& interval : region.dim(static_cast<int>(d)).intervals())
      for (Index i = interval.begin; i < interval.end; ++i) indices[d].push_back(i);
  std::vector<size_t> at(shape.size(), 0);
  std::vector<Index> global(shape.size());
  while (true) {
    for (size_t d = 0; d < at.size(); ++d) global[d] = indices[d][at[d]];
    visit(global, at);
    size_t d = at.size();
    while (d > 0) {
      --d;
      if (++at[d] < indices[d].size()) break;
      at[d] = 0;
      if (d == 0) return;
    }
    if (at.empty()) return;
  }
}

Index linear(const Shape& shape, const std::vector<Index>& global) {
  Index index = 0;
  for (size_t d = 0; d < shape.size(); ++d) index = index * shape[d] + global[d];
  return index;
}

// f4 can be cut at whole bytes only, and has no gaps within its last dim: here it has none at all.
bool whole_bytes(const RandomCase& a, int source_world) {
  try {
    redistribute({a.shape, DType::kF4}, a.src, a.dst.shifted(source_world));
    return true;
  } catch (const Error&) {
    return false;
  }
}

LocalData space(DType dtype, const Shape& extents, uint64_t seed, bool shared) {
  const auto bits = static_cast<size_t>(bits_of(dtype));
  std::mt19937_64 random(seed);
  const bool gaps = dtype != DType::kF4 && random() % 3 == 0;
  std::vector<Index> strides(extents.size());
  Index step = 1;
  for (size_t d = extents.size(); d-- > 0;) {
    strides[d] = step;
    step *= std::max<Index>(extents[d], 1);
    if (gaps) step += static_cast<Index>(random() % 3);
  }
  if (gaps && extents.size() > 1 && random() % 2 == 0) {  // another order of the dims in memory
    std::ranges::reverse(strides);
    step = 1;
    for (size_t d = 0; d < extents.size(); ++d) {
      strides[d] = step;
      step *= std::max<Index>(extents[d], 1) + 1;
    }
  }
  const size_t offset = gaps ? bits / 8 * (random() % 4) : 0;
  LocalData data(offset + static_cast<size_t>(step) * bits / 8 + 64, shared);
  data.offset = offset;
  if (gaps) data.strides = strides;
  return data;
}

size_t place(const LocalData& data, DType dtype, const Shape& extents, const std::vector<size_t>& at) {
  Index element = 0;
  Index contiguous = 1;
  for (size_t d = extents.size(); d-- > 0;) {
    element += static_cast<Index>(at[d]) * (data.strides.empty() ? contiguous : data.strides[d]);
    contiguous *= extents[d];
  }
  return data.offset + static_cast<size_t>(element) * static_cast<size_t>(bits_of(dtype)) / 8;
}

// The half of its byte that an f4 element is in.
std::byte half_of(const std::vector<size_t>& at) {
  return at.back() % 2 == 0 ? std::byte{0x0F} : std::byte{0xF0};
}

void store_element(DType dtype, double value, const std::vector<size_t>& at, std::byte* out) {
  if (dtype != DType::kF4) return store_value(dtype, value, out);
  const std::byte both{static_cast<uint8_t>((static_cast<int64_t>(value) & 15) * 0x11)};
  *out = (*out & ~half_of(at)) | (both & half_of(at));
}

bool equal(DType dtype, const std::vector<size_t>& at, const std::byte* a, const std::byte* b) {
  if (dtype == DType::kF4) return ((*a ^ *b) & half_of(at)) == std::byte{0};
  return std::memcmp(a, b, static_cast<size_t>(bits_of(dtype)) / 8) == 0;
}

// The version that last changed an element.
int64_t last_change(const RandomCase& a, int64_t version, Index element) {
  for (; version > 1 && !a.chances.empty(); --version) {
    const uint64_t drawn = mix(a.seed + mix(static_cast<uint64_t>(version)) + static_cast<uint64_t>(element));
    const double chance = a.chances[static_cast<size_t>(version - 2) % a.chances.size()];
    if (std::ldexp(static_cast<double>(drawn >> 11), -53) < chance) break;
  }
  return version;
}

// This rank's coordinate along the Partial axes, as one number, and how many there are.
std::pair<int, int> partial_term(const Layout& layout, Rank rank) {
  const auto position = layout.mesh().position_of(rank);
  if (!position) return {0, 1};
  const std::vector<int> coordinate = layout.mesh().coordinate(*position);
  int term = 0;
  int terms = 1;
  for (size_t axis = 0; axis < coordinate.size(); ++axis) {
    if (!std::holds_alternative<Partial>(layout.placements()[axis])) continue;
    term = term * layout.mesh().axes()[axis].size + coordinate[axis];
    terms *= layout.mesh().axes()[axis].size;
  }
  return {term, terms};
}

// Values of tensors that travel quantised have signs, and amaxes that differ from part to part by more than powers of
// two, so that formulas carry the difference through to the codes. Terms are only multiplied by powers of two, which
// every reduction preserves.
double wire_factor(const RandomCase& a, Index element, int terms) {
  if (!a.wire) return 1;
  const Index down = element * 6 / std::max<Index>(element_count(a.shape), 1);
  const Index across = element % a.shape.back() * 4 / a.shape.back();
  const double factor = std::ldexp(1.0, -static_cast<int>((static_cast<uint64_t>(down + across) + a.seed) % 9));
  if (terms > 1) return factor;
  const double eighths = 8 - static_cast<double>((5 * down + across) % 4);
  return (mix(a.seed + static_cast<uint64_t>(element)) % 2 == 0 ? -factor : factor) * eighths / 8;
}

// A matrix of the stack, as the source has it; f64 as f32.
struct SourceMatrix {
  std::vector<std::byte> values;
  MatrixView view;

  SourceMatrix(const RandomCase& a, int64_t version, int terms, Index first) {
    const DType as = a.src_dtype == DType::kF64 ? DType::kF32 : a.src_dtype;
    const Index rows = a.shape[a.shape.size() - 2];
    const Index columns = a.shape.back();
    values.resize(static_cast<size_t>(bytes_of(as, rows * columns)));
    for (Index i = 0; i < rows * columns; ++i) {
      std::byte value[8];
      store_value(
          a.src_dtype,
          reduced_value(a.src_dtype, a.src.partial_op(), a.seed, last_change(a, version, first + i), first + i, terms) *
              wire_factor(a, first + i, terms),
          value);
      cast_row(a.src_dtype, as)(value, values.data() + bytes_of(as, i), 1);
    }
    view = {values.data(), as, rows, columns, columns};
  }
};

// One plane of a matrix, quantised as a whole.
struct WholePlane {
  PlaneShape shape;
  std::vector<std::byte> codes, scales;
  float amax = 0;

  WholePlane(const QuantSpec& spec, Plane plane, const MatrixView& matrix)
      : shape(plane_shape(spec, plane, matrix.rows, matrix.columns)),
        codes(static_cast<size_t>(shape.code_bytes())),
        scales(static_cast<size_t>(shape.scale_bytes())),
        amax(compute_amax({&matrix, 1})[0].value) {
    const PlaneMemory memory{codes.data(), shape.code_row_bytes(), scales.data(), shape.scale_row_bytes()};
    quantize(matrix, spec, {amax, amax},
             plane == Plane::kRow ? Planes{.row = memory, .column = {}} : Planes{.row = {}, .column = memory});
  }
};

// The whole tensor in the destination's dtype: quantised matrix by matrix, and back.
std::vector<std::byte> decoded(const RandomCase& a, int64_t version, int terms) {
  const Index count = element_count(a.shape);
  const DType to = a.dst_dtype == DType::kF64 ? DType::kF32 : a.dst_dtype;
  std::vector<std::byte> result(static_cast<size_t>(bytes_of(a.dst_dtype, count)));
  if (count == 0) return result;
  const QuantSpec spec{.format = *a.wire};
  const Index rows = a.shape[a.shape.size() - 2];
  const Index columns = a.shape.back();
  std::vector<std::byte> back(static_cast<size_t>(bytes_of(to, rows * columns)));
  for (Index first = 0; first < count; first += rows * columns) {
    const SourceMatrix matrix(a, version, terms, first);
    const WholePlane plane(spec, Plane::kRow, matrix.view);
    dequantize(spec, Plane::kRow,
               {plane.codes.data(), plane.shape.code_row_bytes(), plane.scales.data(), plane.shape.scale_row_bytes()},
               plane.amax, {back.data(), to, rows, columns, columns});
    cast_row(to, a.dst_dtype)(back.data(), result.data() + bytes_of(a.dst_dtype, first),
                              static_cast<size_t>(rows * columns));
  }
  return result;
}

// The index of an element's scale in a plane; `columns`: scales in a row.
Index scale_place(Format format, Plane plane, Index columns, Index row, Index column) {
  const Index line = plane == Plane::kRow ? row : column;
  const Index along = plane == Plane::kRow ? column : row;
  switch (format) {
    case Format::kFp8E4M3:
    case Format::kFp8E5M2:
      return 0;
    case Format::kFp8Block1x128:
      return line * columns + along / 128;
    case Format::kFp8Block128x128:
      return line / 128 * columns + along / 128;
    case Format::kMxfp8:
    case Format::kMxfp8E5M2:
      return plane == Plane::kRow ? row * columns + column / 32 : row / 32 * columns + column;
    case Format::kNvfp4:
      return line * columns + along / 16;
  }
  return -1;
}

QuantizedLayout planes_layout(const RandomCase& a, PlaneSet planes, const Region& owned) {
  const Shape extents = owned.extents();
  const Index rows = extents[extents.size() - 2];
  const Index columns = extents.back();
  const Index matrices = rows * columns == 0 ? 0 : element_count(extents) / (rows * columns);
  return quantized_layout({.format = *a.wire}, planes, matrices, rows, columns);
}

// Writes what must be in a rank's block of memory, taken from planes of the whole tensor; bytes between them stay.
void put_planes(const RandomCase& a, PlaneSet planes, const Region& owned, int64_t version, int terms,
                std::span<std::byte> block) {
  const QuantSpec spec{.format = *a.wire};
  const Shape extents = owned.extents();
  const Index rows = extents[extents.size() - 2];
  const Index columns = extents.back();
  const QuantizedLayout layout = planes_layout(a, planes, owned);
  const Index whole = a.shape[a.shape.size() - 2] * a.shape.back();
  std::optional<WholePlane> full;
  Index seen = -1;
  const auto cut = [&](Plane plane, const QuantizedLayout::Place& place) {
    const auto code_place = [&](const PlaneShape& shape, Index row, Index column) {
      const bool upright = plane == Plane::kRow || shape.scale_dtype == DType::kF8E8M0;
      return upright ? row * shape.code_columns + column : column * shape.code_columns + row;
    };
    seen = -1;
    for_each_element(a.shape, owned, [&](const std::vector<Index>& global, const std::vector<size_t>& at) {
      Index local = 0;
      for (size_t d = 0; d < extents.size(); ++d) local = local * extents[d] + static_cast<Index>(at[d]);
      const Index matrix = local / (rows * columns);
      const Index source = linear(a.shape, global) / whole;
      if (std::exchange(seen, source) != source)
        full.emplace(spec, plane, SourceMatrix(a, version, terms, source * whole).view);
      const Index row = global[global.size() - 2];
      const Index column = global.back();
      const Index local_row = local / columns % rows;
      const Index local_column = local % columns;
      const Index from = code_place(full->shape, row, column);
      const Index to = matrix * rows * columns + code_place(place.shape, local_row, local_column);
      std::byte* codes = block.data() + place.codes;
      if (*a.wire == Format::kNvfp4) {
        const std::byte code = full->codes[static_cast<size_t>(from / 2)] >> (from % 2 * 4) & std::byte{15};
        codes[to / 2] = (codes[to / 2] & std::byte{15} << (to % 2 == 0 ? 4 : 0)) | code << (to % 2 * 4);
      } else {
        codes[to] = full->codes[static_cast<size_t>(from)];
      }
      const int64_t bytes = bytes_of(full->shape.scale_dtype, 1);
      std::memcpy(block.data() + place.scales + matrix * place.shape.scale_bytes() +
                      scale_place(*a.wire, plane, place.shape.scale_columns, local_row, local_column) * bytes,
                  full->scales.data() + scale_place(*a.wire, plane, full->shape.scale_columns, row, column) * bytes,
                  static_cast<size_t>(bytes));
      if (needs_amax(*a.wire))
        std::memcpy(block.data() + place.amaxes + matrix * static_cast<Index>(sizeof(float)), &full->amax,
                    sizeof(float));
    });
  };
  if (layout.row) cut(Plane::kRow, *layout.row);
  if (layout.column) cut(Plane::kColumn, *layout.column);
}

std::string check_planes(const RandomCase& a, Rank rank, const Region& owned, int64_t version, int terms,
                         std::span<const std::byte> got) {
  std::vector<std::byte> expected(got.begin(), got.end());
  put_planes(a, a.planes, owned, version, terms, expected);
  std::fill(expected.begin() + planes_layout(a, a.planes, owned).bytes, expected.end(), std::byte{0xA5});
  const auto wrong = std::ranges::mismatch(expected, got).in1;
  if (wrong == expected.end()) return "";
  return fmt::format("{} {} {} {} -> {} of {} {}: byte {} of rank {} is wrong", a.name, to_string_shape(a.shape),
                     to_string(a.src_dtype), a.src.to_string(), to_string(a.planes), to_string(*a.wire),
                     a.dst.to_string(), wrong - expected.begin(), rank);
}

int partial_terms(const RandomCase& a) {
  return partial_term(a.src, a.src.mesh().size() > 0 ? a.src.mesh().ranks()[0] : 0).second;
}

PlaneSet random_planes(std::mt19937_64& random) {
  return pick(random, std::vector<PlaneSet>{{.row = true}, {.column = true}, {.row = true, .column = true}});
}

size_t planes_space(const RandomCase& a, PlaneSet planes, const Region& owned) {
  return static_cast<size_t>(planes_layout(a, planes, owned).bytes) + 64;
}

// A layout that cuts between blocks of the planes.
Layout random_whole_blocks(std::mt19937_64& random, const RandomCase& a, PlaneSet planes, int world) {
  while (true) {
    const Layout any = random_layout(random, a.shape, world);
    std::vector<Placement> placements(any.placements().begin(), any.placements().end());
    for (Placement& placement : placements)
      if (auto* ragged = std::get_if<RaggedShard>(&placement))
        for (size_t b = 1; b + 1 < ragged->bounds.size(); ++b) ragged->bounds[b] -= ragged->bounds[b] % 32;
    Layout layout(any.mesh(), std::move(placements));
    try {
      bus::require_planes({.name = a.name, .shape = a.shape, .wire = a.wire, .planes = planes}, layout.bind(a.shape));
      return layout;
    } catch (const Error&) {  // it cuts one
    }
  }
}

}  // namespace

LocalData::LocalData(size_t bytes, bool shared) {
  if (shared)
    shared_ = SharedHeap::process().allocate(bytes);
  else
    own_.resize(bytes);
}

RandomCase random_case(std::mt19937_64& random, const std::string& name, int source_world, int destination_world) {
  static const std::vector<DType> kFloats{DType::kF64, DType::kF32, DType::kF16, DType::kBF16};
  static const std::vector<DType> kReducible{DType::kF64,  DType::kF32, DType::kF16,
                                             DType::kBF16, DType::kI32, DType::kI64};
  static const std::vector<ReduceOp> kOps{ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kAvg,
                                          ReduceOp::kProduct};
  RandomCase a;
  a.name = name;
  a.seed = random();
  for (int d = between(random, 0, 4); d > 0; --d)
    a.shape.push_back(random() % 12 == 0 ? 0 : between(random, 1, a.shape.empty() ? 40 : 13));
  const std::optional<ReduceOp> op = random_op(random, kOps);
  const std::vector<DType> any(all_dtypes().begin(), all_dtypes().end());
  do {
    a.src_dtype = pick(random, op ? kReducible : any);
  } while (op == ReduceOp::kAvg && is_integer(a.src_dtype));
  if (a.src_dtype == DType::kF4) a.shape.push_back(2 * between(random, 0, 12));
  a.dst_dtype = is_castable_float(a.src_dtype) && random() % 2 == 0 ? pick(random, kFloats) : a.src_dtype;
  do {
    a.src = random_layout(random, a.shape, source_world, op);
    a.dst = random_layout(random, a.shape, destination_world);
  } while (a.src_dtype == DType::kF4 && !whole_bytes(a, source_world));
  a.src_shared = random() % 2 == 0;
  a.dst_shared = random() % 2 == 0;
  return a;
}

RandomCase random_wire_case(std::mt19937_64& random, const std::string& name, int source_world, int destination_world,
                            Format format) {
  static const std::vector<DType> kFloats{DType::kF64, DType::kF32, DType::kF16, DType::kBF16};
  static const std::vector<ReduceOp> kOps{ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kAvg};
  RandomCase a;
  a.name = name;
  a.seed = random();
  a.wire = format;
  for (int d = between(random, 0, 2); d > 0; --d) a.shape.push_back(between(random, 1, 3));
  a.shape.push_back(between(random, 1, random() % 4 == 0 ? 300 : 70));
  a.shape.push_back(random() % 20 == 0 ? 0 : 2 * between(random, 1, random() % 4 == 0 ? 150 : 40));
  if (format != Format::kNvfp4 && random() % 2 == 0) ++a.shape.back();
  const std::optional<ReduceOp> op = random_op(random, kOps);
  a.src_dtype = pick(random, kFloats);
  a.dst_dtype = random() % 2 == 0 ? pick(random, kFloats) : a.src_dtype;
  a.src = random_layout(random, a.shape, source_world, op);
  a.dst = random_layout(random, a.shape, destination_world);
  a.src_shared = random() % 2 == 0;
  a.dst_shared = random() % 2 == 0;
  return a;
}

RandomCase random_planes_case(std::mt19937_64& random, const std::string& name, int source_world, int destination_world,
                              Format format) {
  RandomCase a = random_wire_case(random, name, source_world, destination_world, format);
  a.planes = random_planes(random);
  if (format == Format::kNvfp4) a.shape[a.shape.size() - 2] += a.shape[a.shape.size() - 2] % 2;
  if (a.shape.back() == 0) a.shape.back() = 32;
  a.src = random_layout(random, a.shape, source_world, a.src.partial_op());
  a.dst = random_whole_blocks(random, a, a.planes, destination_world);
  return a;
}

RandomCase random_encoded_case(std::mt19937_64& random, const std::string& name, int source_world,
                               int destination_world, Format format) {
  RandomCase a = random_planes_case(random, name, source_world, destination_world, format);
  const PlaneSet taken = random() % 2 == 0 ? PlaneSet{.row = true} : a.planes;
  if (taken != a.planes) a.planes = {};
  do {
    a.src_planes = random_planes(random);
  } while (!column_is_transposed_row({.format = format}) &&
           ((taken.row && !a.src_planes.row) || (taken.column && !a.src_planes.column)));
  a.src = random_whole_blocks(random, a, a.src_planes, source_world);
  return a;
}

LocalData source_space(const RandomCase& a, Rank rank) {
  const Region owned = a.src.bind(a.shape).owned(a.shape, rank);
  if (!a.src_planes.empty()) return LocalData(planes_space(a, a.src_planes, owned), a.src_shared);
  return space(a.src_dtype, owned.extents(), a.seed + static_cast<uint64_t>(rank), a.src_shared);
}

void fill_source(const RandomCase& a, Rank rank, int64_t version, LocalData& data) {
  const Region owned = a.src.bind(a.shape).owned(a.shape, rank);
  if (!a.src_planes.empty()) return put_planes(a, a.src_planes, owned, version, 1, data.bytes());
  const Shape extents = owned.extents();
  const auto [term, terms] = partial_term(a.src, rank);
  for_each_element(a.shape, owned, [&](const std::vector<Index>& global, const std::vector<size_t>& at) {
    const Index element = linear(a.shape, global);
    store_element(a.src_dtype,
                  static_cast<double>(term_value(a.seed, last_change(a, version, element), element, term, terms)) *
                      wire_factor(a, element, terms),
                  at, data.bytes().data() + place(data, a.src_dtype, extents, at));
  });
}

LocalData destination_space(const RandomCase& a, Rank rank) {
  const Region owned = a.dst.bind(a.shape).owned(a.shape, rank);
  const uint64_t seed = ~a.seed + static_cast<uint64_t>(rank);
  LocalData data = a.planes.empty() ? space(a.dst_dtype, owned.extents(), seed, a.dst_shared)
                                    : LocalData(planes_space(a, a.planes, owned), a.dst_shared);
  std::ranges::fill(data.bytes(), std::byte{0xA5});
  return data;
}

std::string check_destination(const RandomCase& a, Rank rank, int64_t version, LocalData& data) {
  const Region owned = a.dst.bind(a.shape).owned(a.shape, rank);
  const Shape extents = owned.extents();
  const int terms = partial_terms(a);
  if (!a.planes.empty()) return check_planes(a, rank, owned, version, terms, data.bytes());
  const size_t bytes = std::max<size_t>(static_cast<size_t>(bits_of(a.dst_dtype)) / 8, 1);
  const std::span<const std::byte> got = data.bytes();
  std::vector<bool> written(got.size(), false);
  std::string wrong;
  const std::vector<std::byte> quantised = a.wire ? decoded(a, version, terms) : std::vector<std::byte>();
  for_each_element(a.shape, owned, [&](const std::vector<Index>& global, const std::vector<size_t>& at) {
    std::byte source[16] = {};
    std::byte expected[16];
    const auto op = a.src.partial_op();
    const Index element = linear(a.shape, global);
    store_element(a.src_dtype, reduced_value(a.src_dtype, op, a.seed, last_change(a, version, element), element, terms),
                  at, source);
    if (a.wire)
      std::memcpy(expected, quantised.data() + bytes_of(a.dst_dtype, linear(a.shape, global)), bytes);
    else if (a.src_dtype == a.dst_dtype)
      std::memcpy(expected, source, bytes);
    else
      cast_row(a.src_dtype, a.dst_dtype)(source, expected, 1);
    const size_t offset = place(data, a.dst_dtype, extents, at);
    std::fill_n(written.begin() + static_cast<ptrdiff_t>(offset), bytes, true);
    if (wrong.empty() && !equal(a.dst_dtype, at, expected, got.data() + offset))
      wrong = fmt::format("{} {} {} {} -> {} {}{}: element {} on rank {} is wrong", a.name, to_string_shape(a.shape),
                          to_string(a.src_dtype), a.src.to_string(), to_string(a.dst_dtype), a.dst.to_string(),
                          a.wire ? fmt::format(" as {}", to_string(*a.wire)) : "", fmt::join(global, ","), rank);
  });
  for (size_t i = 0; i < written.size() && wrong.empty(); ++i)
    if (!written[i] && got[i] != std::byte{0xA5})
      wrong = fmt::format("{}: byte {} beside the elements of rank {} was written", a.name, i, rank);
  return wrong;
}

}  // namespace tessera::test
