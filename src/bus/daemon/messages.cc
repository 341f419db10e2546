#include "bus/daemon/messages.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/fail.h"
#include "bus/registration/layout_table.h"
#include "bus/registration/records.h"

namespace tessera::bus {
namespace {

constexpr uint32_t kMaxLayoutBytes = 64 << 10;
constexpr uint32_t kNoLayout = UINT32_MAX;  // that of the pair, or replicated

void write_dims(const std::vector<Index>& dims, ByteWriter& out) {
  out.put(static_cast<uint32_t>(dims.size()));
  for (const Index dim : dims) out.put(dim);
}
std::vector<Index> read_dims(ByteReader& in) {
  std::vector<Index> dims(in.get_count(kMaxDims, sizeof(Index)));
  for (Index& dim : dims) dim = in.get<Index>();
  return dims;
}

}  // namespace

void write_layout(const Layout& layout, ByteWriter& out) {
  out.put_string(layout == Layout{} ? std::string() : layout.to_string());
}
Layout read_layout(ByteReader& in) {
  const std::string text = in.get_string(kMaxLayoutBytes);
  return text.empty() ? Layout{} : Layout::parse(text);
}

void RegisterCall::write_tensors(const std::vector<Tensor>& tensors, ByteWriter& out) {
  LayoutTableWriter layouts;
  std::vector<uint32_t> layout_of;
  for (const Tensor& tensor : tensors)
    layout_of.push_back(tensor.spec.layout == Layout{} ? kNoLayout : layouts.add(tensor.spec.layout));
  layouts.write(out);
  out.put(static_cast<uint32_t>(tensors.size()));
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = tensors[i];
    out.put_string(tensor.spec.name);
    out.put(tensor.spec.dtype);
    write_dims(tensor.spec.shape, out);
    out.put(layout_of[i]);
    write_dims(tensor.spec.strides, out);
    write_source(tensor.spec.source, out);
    write_wire({tensor.spec.wire, tensor.spec.planes, tensor.spec.fused}, out);
    out.put(static_cast<uint8_t>(tensor.place.has_value()));
    if (!tensor.place) continue;
    out.put(tensor.place->arena);
    out.put(tensor.place->offset);
  }
}

std::vector<RegisterCall::Tensor> RegisterCall::read_tensors(ByteReader& in) {
  constexpr size_t kLeastTensor = 4 + 1 + 4 + 4 + 4 + kLeastSource + 1 + 1;
  LayoutTable layouts = LayoutTable::read(in, "Register");
  std::vector<Tensor> tensors(in.get_count(kMaxTensors, kLeastTensor));
  for (Tensor& tensor : tensors) {
    tensor.spec.name = in.get_string(kMaxNameBytes);
    tensor.spec.dtype = in.get_enum(kLastDType);
    tensor.spec.shape = read_dims(in);
    const auto layout = in.get<uint32_t>();
    if (layout != kNoLayout) tensor.spec.layout = layouts.take(layout, tensor.spec.name);
    tensor.spec.strides = read_dims(in);
    tensor.spec.source = read_source(in, tensor.spec.name);
    WireAsked wire = read_wire(in, tensor.spec.name);
    tensor.spec.wire = wire.format;
    tensor.spec.planes = wire.planes;
    tensor.spec.fused = std::move(wire.fused);
    if (!in.get_bool()) continue;
    const auto arena = in.get<uint32_t>();
    tensor.place = Place{.arena = arena, .offset = in.get<uint64_t>()};
  }
  return tensors;
}

std::string agent_socket_name(const std::string& name_space, const std::string& job, Rank rank) {
  const std::string who = fmt::format("{}\n{}\n{}", name_space, job, rank);
  return fmt::format("agent-{:016x}", XXH3_64bits(who.data(), who.size()));
}

}  // namespace tessera::bus
