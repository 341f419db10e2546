#include "tools/bench/tensors.h"

#include <array>
#include <cstring>

#include "base/fail.h"

namespace tessera::bench {
namespace {

// The bits of a bf16 element: a normal number, another one a row or a column further.
uint16_t value_at(Index tensor, Index row, Index column) {
  return static_cast<uint16_t>(0x1000 + ((tensor * 131 + row * 31 + column * 7) & 0x1fff));
}

size_t element_bytes(DType dtype) {
  return static_cast<size_t>(bits_of(dtype)) / 8;
}

// The same value in `dtype`, bf16 or f32, whose upper half a bf16 is.
void put(std::byte* element, DType dtype, uint16_t bf16) {
  const uint32_t f32 = uint32_t{bf16} << 16;
  std::memcpy(element, dtype == DType::kBF16 ? static_cast<const void*>(&bf16) : &f32, element_bytes(dtype));
}

bool holds(const std::byte* element, DType dtype, uint16_t bf16) {
  std::array<std::byte, sizeof(float)> wanted{};
  put(wanted.data(), dtype, bf16);
  return std::memcmp(element, wanted.data(), element_bytes(dtype)) == 0;
}

const Interval& interval_of(const Region& region, int dim) {
  TESSERA_CHECK_EQ(region.dim(dim).intervals().size(), size_t{1});
  return region.dim(dim).intervals().front();
}

}  // namespace

RankTensors::RankTensors(const Case& c, const std::string& layout, Rank rank, DType dtype, Memory memory)
    : shape_(c.shape),
      layout_(Layout::parse(layout)),
      owned_(layout_.bind(shape_).owned(shape_, rank)),
      dtype_(dtype),
      tensors_(c.tensors) {
  const size_t bytes = static_cast<size_t>(tensors_ * local_elements()) * element_bytes(dtype_);
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
  RankTensors tensors(c, c.src, rank, c.src_dtype, c.memory);
  tensors.fill();
  return tensors;
}

RankTensors RankTensors::of_destination(const Case& c, Rank rank) {
  return {c, c.dst, rank, c.dst_dtype, Memory::kPrivate};
}

void RankTensors::fill() {
  const Interval rows = interval_of(owned_, 0), columns = interval_of(owned_, 1);
  std::byte* element = data_;
  for (Index tensor = 0; tensor < tensors_; ++tensor)
    for (Index row = rows.begin; row < rows.end; ++row)
      for (Index column = columns.begin; column < columns.end; ++column, element += element_bytes(dtype_))
        put(element, dtype_, value_at(tensor, row, column));
}

std::vector<TensorSpec> RankTensors::specs() const {
  const size_t bytes = static_cast<size_t>(local_elements()) * element_bytes(dtype_);
  std::vector<TensorSpec> specs;
  for (int tensor = 0; tensor < tensors_; ++tensor)
    specs.push_back({.name = fmt::format("layers.{}.weight", tensor),
                     .data = data_ + static_cast<size_t>(tensor) * bytes,
                     .dtype = dtype_,
                     .shape = shape_,
                     .layout = layout_});
  return specs;
}

void RankTensors::check() const {
  constexpr Index kStride = 65'521;  // prime: every place in a row and a page comes up
  const Interval rows = interval_of(owned_, 0), columns = interval_of(owned_, 1);
  for (Index i = 0; i < tensors_ * local_elements(); i += kStride) {
    const Index tensor = i / local_elements(), within = i % local_elements();
    const Index row = rows.begin + within / columns.size(), column = columns.begin + within % columns.size();
    if (!holds(data_ + static_cast<size_t>(i) * element_bytes(dtype_), dtype_, value_at(tensor, row, column)))
      fail(ErrorCode::kDataLoss, "tensor {} holds a wrong element at row {}, column {}"_message, tensor, row, column);
  }
}

}  // namespace tessera::bench
