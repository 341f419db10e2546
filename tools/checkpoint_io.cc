#include "tools/checkpoint_io.h"

#include <cstring>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/fail.h"
#include "checkpoint/checksums.h"
#include "checkpoint/shown.h"
#include "codec/simd/cast.h"
#include "tools/interrupt.h"
#include "tools/quantised_slice.h"

namespace tessera::tools {
namespace {

// Whether this rank holds the neutral element instead of the slice.
bool holds_neutral(const Layout& layout, Rank rank) {
  const auto op = layout.partial_op();
  if (op != ReduceOp::kSum && op != ReduceOp::kProduct) return false;
  const auto position = layout.mesh().position_of(rank);
  if (!position) return false;
  const std::vector<int> coordinate = layout.mesh().coordinate(*position);
  for (size_t axis = 0; axis < coordinate.size(); ++axis)
    if (std::holds_alternative<Partial>(layout.placements()[axis]) && coordinate[axis] != 0) return true;
  return false;
}

// The bits of an element e with x op e == x for every x, except that a product with 1+0i may change the sign of a zero,
// and makes NaN of infinity. REQUIRES: reducible(op, dtype).
uint64_t neutral_bits(ReduceOp op, DType dtype) {
  const bool sum = op == ReduceOp::kSum;
  switch (dtype) {
    case DType::kF64:
      return sum ? 0x8000000000000000 : 0x3FF0000000000000;
    case DType::kF32:
      return sum ? 0x80000000 : 0x3F800000;
    case DType::kF16:
      return sum ? 0x8000 : 0x3C00;
    case DType::kBF16:
      return sum ? 0x8000 : 0x3F80;
    case DType::kC64:
      return sum ? 0x8000000080000000 : 0x000000003F800000;
    default:
      TESSERA_CHECK(is_integer(dtype));
      return sum ? 0 : 1;
  }
}

void fill_neutral(const HeldTensor& tensor) {
  const uint64_t bits = neutral_bits(*tensor.layout.partial_op(), tensor.info.dtype);
  const auto element = static_cast<size_t>(bytes_of(tensor.info.dtype, 1));
  for (size_t offset = 0; offset < tensor.memory.size(); offset += element)
    std::memcpy(tensor.memory.data() + offset, &bits, element);
}

// The slice as in the file or, with a cast or quantised, in the tensor's dtype. Reuses its memory for each tensor.
class SliceReader {
 public:
  explicit SliceReader(const Checkpoint& checkpoint) : checkpoint_(checkpoint), quantised_(checkpoint) {}

  std::span<const std::byte> read_quantised(const TensorInfo& in_file, const HeldTensor& tensor, Format format,
                                            const Interrupt& interrupt) {
    const auto slice = sized(cast_, bytes_of(tensor.info.dtype, tensor.region.size()));
    quantised_.read(in_file, format, tensor.region, tensor.info.dtype, slice, interrupt);
    return slice;
  }

  std::span<const std::byte> read(const TensorInfo& in_file, const HeldTensor& tensor) {
    const auto raw = sized(raw_, bytes_of(in_file.dtype, tensor.region.size()));
    checkpoint_.read_slice(in_file.name, tensor.region, raw);
    if (in_file.dtype == tensor.info.dtype) return raw;
    const auto cast = sized(cast_, bytes_of(tensor.info.dtype, tensor.region.size()));
    cast_row(in_file.dtype, tensor.info.dtype)(raw.data(), cast.data(), static_cast<size_t>(tensor.region.size()));
    return cast;
  }

 private:
  static std::span<std::byte> sized(std::vector<std::byte>& buffer, int64_t bytes) {
    if (buffer.size() < static_cast<size_t>(bytes)) buffer.resize(static_cast<size_t>(bytes));
    return std::span(buffer).first(static_cast<size_t>(bytes));
  }

  const Checkpoint& checkpoint_;
  QuantisedSlices quantised_;
  std::vector<std::byte> raw_;
  std::vector<std::byte> cast_;
};

}  // namespace

void load_slices(const Checkpoint& checkpoint, const HeldTensors& held, const Interrupt& interrupt) {
  for (const HeldTensor& tensor : held.tensors()) {
    interrupt.check();
    if (tensor.region.empty()) continue;
    if (holds_neutral(tensor.layout, held.rank())) {
      fill_neutral(tensor);
    } else {
      checkpoint.read_slice(tensor.info.name, tensor.region, tensor.memory);
    }
  }
}

void verify_checksums(const Checkpoint& checkpoint, const Interrupt& interrupt, std::string_view way_out) {
  for (const TensorInfo& info : checkpoint.tensors()) {
    interrupt.check();
    try {
      checkpoint.verify(info.name);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kDataLoss) throw;
      fail(error.code(), "{}; {}"_message, error.what(), way_out);
    }
  }
}

void verify_slices(const Checkpoint& checkpoint, const HeldTensors& held, std::span<const std::optional<Format>> wires,
                   const Interrupt& interrupt) {
  TESSERA_CHECK(wires.empty() || wires.size() == held.tensors().size());
  SliceReader reader(checkpoint);
  for (size_t i = 0; i < held.tensors().size(); ++i) {
    interrupt.check();
    const HeldTensor& tensor = held.tensors()[i];
    const bool quantised = !wires.empty() && wires[i].has_value();
    const TensorInfo& info = tensor.info;
    const TensorInfo* in_file = checkpoint.find(info.name);
    const auto fail_verify = [&](const std::string& why) {
      fail(ErrorCode::kDataLoss, "verification failed on rank {}: tensor {} {} ({})"_message, held.rank(),
           checkpoint::shown(info.name), why, checkpoint.path().string());
    };
    if (in_file == nullptr) fail_verify("is not in the checkpoint");
    const bool comparable =
        in_file->dtype == info.dtype || (is_castable_float(in_file->dtype) && is_castable_float(info.dtype));
    if (in_file->shape != info.shape || !comparable)
      fail_verify(fmt::format("is {} {} here and {} {} in the checkpoint"_message, to_string(info.dtype),
                              to_string_shape(info.shape), to_string(in_file->dtype), to_string_shape(in_file->shape)));
    if (tensor.region.empty()) continue;
    const auto expected =
        quantised ? reader.read_quantised(*in_file, tensor, *wires[i], interrupt) : reader.read(*in_file, tensor);
    if (const auto difference = first_difference(info.dtype, tensor.region, expected, tensor.memory))
      fail_verify((quantised ? fmt::format("as {}: ", to_string(*wires[i])) : "") + difference->to_string());
  }
}

std::filesystem::path write_slices(const std::filesystem::path& folder, const HeldTensors& held, int64_t version) {
  std::vector<TensorView> views;
  nlohmann::json tensors = nlohmann::json::object();
  checkpoint::Checksums checksums;
  for (const HeldTensor& tensor : held.tensors()) {
    const TensorInfo& info = tensor.info;
    const bool empty_everywhere = tensor.member && element_count(info.shape) == 0;
    if (tensor.region.empty() && !empty_everywhere) continue;
    views.push_back({info.name, info.dtype, tensor.region.extents(), tensor.memory.data()});
    checksums.emplace(info.name, checkpoint::checksum_of(tensor.memory));
    tensors[info.name] = {
        {"shape", info.shape}, {"dtype", to_string(info.dtype)}, {"layout", tensor.layout.to_string()}};
  }
  const std::filesystem::path path = folder / fmt::format("rank-{:05}.safetensors", held.rank());
  write_safetensors(path, views,
                    {{"version", std::to_string(version)},
                     {"tensors", tensors.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)},
                     {std::string(checkpoint::kChecksumsKey), checkpoint::format_checksums(checksums)}});
  return path;
}

}  // namespace tessera::tools
