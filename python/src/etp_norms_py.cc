// Norms of what is cut along its rows over a group: the same value on all ranks, and for every number of ranks.
//
// The powers of 16 rows are added to a block's sum, in f64: no two ranks share a block, as shards begin at a multiple
// of 16 rows. Blocks are then added in the order of rows.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/fail.h"
#include "codec/float/float_bits.h"
#include "codec/simd/squares.h"
#include "collective/group.h"
#include "etp_values.h"

namespace tessera::python {
namespace {

constexpr int64_t kBlockRows = 16;
constexpr size_t kLanes = 8;  // partial sums of a block, so that a compiler can add several at a time

// [slices, rows, columns]: a matrix, or experts that are cut along their rows.
struct Part {
  uintptr_t address = 0;
  int64_t slices = 0;
  int64_t rows = 0;  // of this rank, of each slice
  int64_t columns = 0;
  DType dtype = DType::kF32;
  int64_t shard_rows = 0;  // of every rank's shard, with padding; 0: every rank has all rows
  int64_t total = 0;       // rows of all ranks
};
using PartTuple = std::tuple<uintptr_t, int64_t, int64_t, int64_t, std::string, int64_t, int64_t>;

struct Order {
  double p = 2;
  bool infinite() const { return std::isinf(p); }
  double power(double value) const {
    const double magnitude = std::fabs(value);
    if (p == 2) return magnitude * magnitude;
    if (p == 0) return magnitude != 0 ? 1 : 0;
    return p == 1 || infinite() ? magnitude : std::pow(magnitude, p);
  }
  double add(double a, double b) const {
    if (!infinite()) return a + b;
    if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<double>::quiet_NaN();
    return p > 0 ? std::max(a, b) : std::min(a, b);
  }
  double nothing() const { return infinite() && p < 0 ? p * -1 : 0; }
  double root(double sum) const {
    if (p == 2) return std::sqrt(sum);
    return p == 0 || p == 1 || infinite() ? sum : std::pow(sum, 1 / p);
  }
};

// Other powers than squares, in the order of codec/simd/squares.h.
template <typename T>
double block_power(const T* values, int64_t count, const Order& order, auto widened) {
  std::array<double, kLanes> lanes;
  lanes.fill(order.nothing());
  for (int64_t i = 0; i < count; ++i) {
    double& lane = lanes[static_cast<size_t>(i) % kLanes];
    lane = order.add(lane, order.power(widened(values[i])));
  }
  double sum = order.nothing();
  for (const double lane : lanes) sum = order.add(sum, lane);
  return sum;
}

double power_of_block(const std::byte* at, int64_t count, DType dtype, const Order& order) {
  if (order.p == 2 && sums_squares(dtype)) return sum_of_squares(dtype, at, static_cast<size_t>(count));
  switch (dtype) {
    case DType::kF64:
      return block_power(reinterpret_cast<const double*>(at), count, order, [](double v) { return v; });
    case DType::kF32:
      return block_power(reinterpret_cast<const float*>(at), count, order, [](float v) { return double{v}; });
    case DType::kBF16:
      return block_power(reinterpret_cast<const uint16_t*>(at), count, order,
                         [](uint16_t v) { return double{std::bit_cast<float>(uint32_t{v} << 16)}; });
    case DType::kF16:
      return block_power(reinterpret_cast<const uint16_t*>(at), count, order,
                         [](uint16_t v) { return double{f32_from_f16(v)}; });
    default:
      fail(ErrorCode::kInvalidArgument, "a norm of {} elements: f64, f32, bf16 and f16 are possible"_message,
           to_string(dtype));
  }
}

int64_t blocks_of(int64_t rows) {
  return (rows + kBlockRows - 1) / kBlockRows;
}

int64_t rows_of(const Part& part, int rank) {
  if (part.shard_rows == 0) return part.rows;
  return std::min((rank + 1) * part.shard_rows, part.total) - std::min(rank * part.shard_rows, part.total);
}

void append_blocks(const Part& part, const Order& order, std::vector<double>& sums) {
  const auto* data = at_address<const std::byte>(part.address);
  for (int64_t slice = 0; slice < part.slices; ++slice)
    for (int64_t row = 0; row < part.rows; row += kBlockRows) {
      const int64_t first = (slice * part.rows + row) * part.columns;
      const int64_t count = std::min(kBlockRows, part.rows - row) * part.columns;
      sums.push_back(power_of_block(data + bytes_of(part.dtype, first), count, part.dtype, order));
    }
}

std::vector<double> doubles_of(const std::string& bytes) {
  std::vector<double> values(bytes.size() / sizeof(double));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(double));
  return values;
}

// The sums of powers, one a part: its root is the part's norm, and the root of all of them that of all parts.
std::vector<double> power_sums(const etp::ShardGroup& group, const std::vector<Part>& parts, const Order& order) {
  std::vector<double> shared;
  for (const Part& part : parts)
    if (part.shard_rows != 0) append_blocks(part, order, shared);
  std::vector<std::vector<double>> of_ranks(static_cast<size_t>(group.size()));
  std::string blob(reinterpret_cast<const char*>(shared.data()), shared.size() * sizeof(double));
  const std::vector<std::string> blobs = group.impl()->exchange("a norm", std::move(blob));
  for (size_t r = 0; r < of_ranks.size(); ++r) {
    int64_t blocks = 0;
    for (const Part& part : parts)
      if (part.shard_rows != 0) blocks += part.slices * blocks_of(rows_of(part, static_cast<int>(r)));
    if (blobs[r].size() != static_cast<size_t>(blocks) * sizeof(double))
      fail(ErrorCode::kMismatch,
           "a norm: {} sent {} bytes for {} blocks of rows: all ranks ask for the same norms"_message,
           group.impl()->describe(static_cast<int>(r)), blobs[r].size(), blocks);
    of_ranks[r] = doubles_of(blobs[r]);
  }
  std::vector<double> sums;
  std::vector<size_t> at(of_ranks.size());
  for (const Part& part : parts) {
    double sum = order.nothing();
    if (part.shard_rows == 0) {
      std::vector<double> own;
      append_blocks(part, order, own);
      for (const double block : own) sum = order.add(sum, block);
    } else {
      for (int64_t slice = 0; slice < part.slices; ++slice)
        for (size_t r = 0; r < of_ranks.size(); ++r)
          for (int64_t i = blocks_of(rows_of(part, static_cast<int>(r))); i > 0; --i)
            sum = order.add(sum, of_ranks[r][at[r]++]);
    }
    sums.push_back(sum);
  }
  return sums;
}

std::vector<double> norms(const etp::ShardGroup& group, const std::vector<PartTuple>& given, double p, bool together) {
  const nb::gil_scoped_release released;
  const SignalHook hook;
  std::vector<Part> parts;
  for (const auto& [address, slices, rows, columns, dtype, shard_rows, total] : given)
    parts.push_back({address, slices, rows, columns, parse_dtype(dtype), shard_rows, total});
  const Order order{p};
  std::vector<double> found = power_sums(group, parts, order);
  if (together) {
    double sum = order.nothing();
    for (const double each : found) sum = order.add(sum, each);
    found = {sum};
  }
  for (double& each : found) each = order.root(each);
  return found;
}

}  // namespace

void bind_etp_norms(nb::module_& module) {
  module.def("etp_norms", norms, nb::arg("group"), nb::arg("parts"), nb::arg("order"), nb::arg("together"),
             "Collective: the norm of each part, or of all of them together. A part is (address of this rank's rows, "
             "slices, rows of each, elements of a row, dtype, rows of every shard or 0 for what every rank has whole, "
             "rows of all).");
}

}  // namespace tessera::python
