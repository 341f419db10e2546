#include "tools/bench/tensors.h"

#include <array>
#include <cstring>

#include "base/fail.h"

namespace tessera::bench {
namespace {

// The bits of a bf16 element: a normal number, which differs between neighbouring rows and columns.
uint16_t value_at(Index tensor, Index row, Index column) {
  return static_cast<uint16_t>(0x1000 + ((tensor * 131 + row * 31 + column * 7) & 0x1fff));
}

size_t element_bytes(DType dtype) {
  return static_cast<size_t>(bits_of(dtype)) / 8;
}

// Writes the same value in `dtype`: bf16; f32, whose upper half is the bf16; or the bits as an integer.
void put(std::byte* element, DType dtype, uint16_t bf16) {
  const uint64_t bits = dtype == DType::kF32 ? uint64_t{bf16} << 16 : bf16;  // little-endian
  std::memcpy(element, &bits, element_bytes(dtype));
}

bool holds(const std::byte* element, DType dtype, uint16_t bf16) {
  std::array<std::byte, sizeof(uint64_t)> wanted{};
  put(wanted.data(), dtype, bf16);
  return std::memcmp(element, wanted.data(), element_bytes(dtype)) == 0;
}

const Interval& interval_of(const Region& region, int dim) {
  TESSERA_CHECK_EQ(region.dim(dim).intervals().size(), size_t{1});
  return region.dim(dim).intervals().front();
}

// In a vector, each element is a row.
struct Box {
  Interval rows{};
  Interval columns{0, 1};
};
Box box_of(const Region& owned) {
  if (owned.empty()) return {};
  Box box{.rows = interval_of(owned, 0)};
  if (owned.ndim() > 1) box.columns = interval_of(owned, 1);
  return box;
}

}  // namespace

RankTensors::RankTensors(const Case& c, Side side, Rank rank, Memory memory) {
  size_t bytes = 0;
  for (const TensorGroup& group : c.groups) {
    const bool source = side == Side::kSource;
    Layout layout = Layout::parse(source ? group.src : group.dst);
    Region owned = layout.bind(group.shape).owned(group.shape, rank);
    const DType dtype = source ? group.src_dtype : group.dst_dtype;
    const size_t each = static_cast<size_t>(owned.size()) * element_bytes(dtype);
    parts_.push_back({group.shape, std::move(layout), std::move(owned), dtype, group.tensors, bytes, each});
    bytes += each * static_cast<size_t>(group.tensors);
  }
  if (memory == Memory::kShared) {
    shared_ = SharedHeap::process().allocate(bytes, 4096);
    data_ = shared_.data();
  } else {
    private_.reset(new std::byte[bytes]);
    data_ = private_.get();
    std::memset(data_, 0xff, bytes);
  }
}

RankTensors RankTensors::of_source(const Case& c, Rank rank) {
  RankTensors tensors(c, Side::kSource, rank, c.memory);
  tensors.fill();
  return tensors;
}

RankTensors RankTensors::of_destination(const Case& c, Rank rank) {
  return {c, Side::kDestination, rank, Memory::kPrivate};
}

void RankTensors::fill() {
  std::byte* element = data_;
  Index tensor = 0;
  for (const Part& part : parts_) {
    const auto [rows, columns] = box_of(part.owned);
    const size_t size = element_bytes(part.dtype);
    for (int t = 0; t < part.tensors; ++t, ++tensor)
      for (Index row = rows.begin; row < rows.end; ++row)
        for (Index column = columns.begin; column < columns.end; ++column, element += size)
          put(element, part.dtype, value_at(tensor, row, column));
  }
}

std::vector<TensorSpec> RankTensors::specs() const {
  std::vector<TensorSpec> specs;
  for (const Part& part : parts_)
    for (int t = 0; t < part.tensors; ++t)
      specs.push_back({.name = fmt::format("layers.{}.weight", specs.size()),
                       .data = data_ + part.offset + static_cast<size_t>(t) * part.bytes,
                       .dtype = part.dtype,
                       .shape = part.shape,
                       .layout = part.layout});
  return specs;
}

void RankTensors::check() const {
  constexpr Index kStride = 65'521;  // prime, so that every place in a row and in a page is checked
  Index first_tensor = 0;
  for (const Part& part : parts_) {
    const auto [rows, columns] = box_of(part.owned);
    const Index elements = part.owned.size();
    for (Index i = 0; i < part.tensors * elements; i += kStride) {
      const Index tensor = first_tensor + i / elements, within = i % elements;
      const Index row = rows.begin + within / columns.size(), column = columns.begin + within % columns.size();
      const std::byte* element = data_ + part.offset + static_cast<size_t>(i) * element_bytes(part.dtype);
      if (!holds(element, part.dtype, value_at(tensor, row, column)))
        fail(ErrorCode::kDataLoss, "tensor {} holds a wrong element at row {}, column {}"_message, tensor, row, column);
    }
    first_tensor += part.tensors;
  }
}

}  // namespace tessera::bench
