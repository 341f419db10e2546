#include "bus/daemon/messages.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/fail.h"
#include "bus/registration/layout_table.h"
#include "bus/registration/records.h"
#include "peer/message.h"

namespace tessera::bus {
namespace {

constexpr uint32_t kMaxLayoutBytes = 64 << 10;
constexpr uint32_t kNoLayout = UINT32_MAX;  // that of the pair, or replicated
constexpr uint32_t kMaxUrl = 4096;
constexpr size_t kMaxStatusText = 700;  // in a record of the queue

void write_timeout(Timeout timeout, ByteWriter& out) {
  out.put(static_cast<int64_t>(timeout.count()));
}
Timeout read_timeout(ByteReader& in) {
  const auto nanoseconds = in.get<int64_t>();
  if (nanoseconds < 0) fail(ErrorCode::kInvalidArgument, "agent: a timeout of {} ns", nanoseconds);
  return Timeout(nanoseconds);
}

// An empty text is no layout: that of the pair, or replicated.
void write_layout(const Layout& layout, ByteWriter& out) {
  out.put_string(layout == Layout{} ? std::string() : layout.to_string());
}
Layout read_layout(ByteReader& in) {
  const std::string text = in.get_string(kMaxLayoutBytes);
  return text.empty() ? Layout{} : Layout::parse(text);
}

void write_optional(const std::optional<int64_t>& value, ByteWriter& out) {
  out.put(static_cast<uint8_t>(value.has_value()));
  out.put(value.value_or(0));
}
std::optional<int64_t> read_optional(ByteReader& in) {
  const bool there = in.get_bool();
  const auto value = in.get<int64_t>();
  return there ? std::optional(value) : std::nullopt;
}

void write_dims(const std::vector<Index>& dims, ByteWriter& out) {
  out.put(static_cast<uint32_t>(dims.size()));
  for (const Index dim : dims) out.put(dim);
}
std::vector<Index> read_dims(ByteReader& in) {
  std::vector<Index> dims(in.get_count(kMaxDims, sizeof(Index)));
  for (Index& dim : dims) dim = in.get<Index>();
  return dims;
}

void write_progress(const Progress& progress, ByteWriter& out) {
  out.put(progress.bytes_done);
  out.put(progress.bytes_total);
  out.put(progress.seconds);
}
Progress read_progress(ByteReader& in) {
  Progress progress;
  progress.bytes_done = in.get<int64_t>();
  progress.bytes_total = in.get<int64_t>();
  progress.seconds = in.get<double>();
  return progress;
}

}  // namespace

void OpenSession::write(ByteWriter& out) const {
  out.put(protocol_min);
  out.put(protocol_max);
  out.put_string(release);
  if (!speaks_ours()) return;
  worker.write(out);
  out.put_string(options.job);
  out.put(options.rank);
  out.put(static_cast<int32_t>(options.world));
  out.put_string(options.store);
  out.put_string(options.name_space);
  out.put(static_cast<int32_t>(options.threads));
  out.put(static_cast<uint8_t>(options.digest));
  write_timeout(options.timeout, out);
  write_timeout(options.stall, out);
}

OpenSession OpenSession::read(ByteReader& in) {
  OpenSession open;
  open.protocol_min = in.get<uint16_t>();
  open.protocol_max = in.get<uint16_t>();
  open.release = in.get_string(64);
  if (!open.speaks_ours()) {
    in.skip_rest();
    return open;
  }
  open.worker = Incarnation::read(in);
  open.options.job = in.get_string(kMaxNameBytes);
  open.options.rank = in.get<Rank>();
  open.options.world = in.get<int32_t>();
  open.options.store = in.get_string(kMaxUrl);
  open.options.name_space = in.get_string(kMaxNameBytes);
  open.options.threads = in.get<int32_t>();
  open.options.digest = in.get_bool();
  open.options.timeout = read_timeout(in);
  open.options.stall = read_timeout(in);
  in.skip_rest();  // a later version may have more to say
  return open;
}

void SessionOpened::write(ByteWriter& out) const {
  out.put(protocol);
  out.put_string(release);
  out.put(session);
  agent.write(out);
}

SessionOpened SessionOpened::read(ByteReader& in) {
  SessionOpened opened;
  opened.protocol = in.get<uint16_t>();
  opened.release = in.get_string(64);
  opened.session = in.get<uint64_t>();
  opened.agent = Incarnation::read(in);
  return opened;
}

void CallFailed::out_status(ByteWriter& out) const {
  write_status(status, out);
}
CallFailed CallFailed::read(ByteReader& in) {
  return {.status = read_status(in)};
}

void PairCall::write(ByteWriter& out) const {
  out.put(session);
  out.put_string(options.name);
  out.put_string(options.peer);
  write_timeout(options.timeout, out);
  write_layout(options.layout, out);
}

PairCall PairCall::read(ByteReader& in) {
  PairCall call;
  call.session = in.get<uint64_t>();
  call.options.name = in.get_string(kMaxNameBytes);
  call.options.peer = in.get_string(kMaxNameBytes);
  call.options.timeout = read_timeout(in);
  call.options.layout = read_layout(in);
  return call;
}

void Paired::write(ByteWriter& out) const {
  out.put(pair);
  out.put(peer_world);
}
Paired Paired::read(ByteReader& in) {
  Paired paired;
  paired.pair = in.get<uint32_t>();
  paired.peer_world = in.get<int32_t>();
  return paired;
}

void ManifestCall::write(ByteWriter& out) const {
  out.put(session);
  out.put(pair);
  out.put_string(batch);
  write_timeout(timeout, out);
}
ManifestCall ManifestCall::read(ByteReader& in) {
  ManifestCall call;
  call.session = in.get<uint64_t>();
  call.pair = in.get<uint32_t>();
  call.batch = in.get_string(kMaxNameBytes);
  call.timeout = read_timeout(in);
  return call;
}

void AllGatherCall::write(ByteWriter& out) const {
  out.put(session);
  out.put(pair);
  out.put_string(batch);
  out.put_string(value);
  write_timeout(timeout, out);
}
AllGatherCall AllGatherCall::read(ByteReader& in) {
  AllGatherCall call;
  call.session = in.get<uint64_t>();
  call.pair = in.get<uint32_t>();
  call.batch = in.get_string(kMaxNameBytes);
  call.value = in.get_string(kMaxGathered);
  call.timeout = read_timeout(in);
  return call;
}

void Gathered::write(ByteWriter& out) const {
  out.put(static_cast<uint32_t>(values.size()));
  for (const std::string& value : values) out.put_string(value);
}
Gathered Gathered::read(ByteReader& in) {
  Gathered gathered;
  const uint32_t count = in.get_count(kMaxWorld, sizeof(uint32_t));
  for (uint32_t i = 0; i < count; ++i) gathered.values.push_back(in.get_string(kMaxGathered));
  return gathered;
}

void RegisterCall::write(ByteWriter& out) const {
  out.put(session);
  out.put(pair);
  out.put_string(batch);
  out.put(static_cast<uint8_t>(sends));
  write_timeout(timeout, out);
  out.put(options.mode);
  out.put(static_cast<int32_t>(options.snapshots));
  out.put(static_cast<uint8_t>(options.pinned));
  out.put(static_cast<uint8_t>(options.delta));
  out.put(lent_bytes);
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

RegisterCall RegisterCall::read(ByteReader& in) {
  constexpr size_t kLeastTensor = 4 + 1 + 4 + 4 + 4 + kLeastSource + 1 + 1;
  RegisterCall call;
  call.session = in.get<uint64_t>();
  call.pair = in.get<uint32_t>();
  call.batch = in.get_string(kMaxNameBytes);
  call.sends = in.get_bool();
  call.timeout = read_timeout(in);
  call.options.mode = in.get_enum(Mode::kStaged);
  call.options.snapshots = in.get<int32_t>();
  call.options.pinned = in.get_bool();
  call.options.delta = in.get_bool();
  call.lent_bytes = in.get<uint64_t>();
  LayoutTable layouts = LayoutTable::read(in, "Register");
  call.tensors.resize(in.get_count(kMaxTensors, kLeastTensor));
  for (Tensor& tensor : call.tensors) {
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
  return call;
}

void ObjectCall::write(ByteWriter& out) const {
  out.put(session);
  out.put(object);
  out.put(version);
  write_timeout(timeout, out);
}
ObjectCall ObjectCall::read(ByteReader& in) {
  ObjectCall call;
  call.session = in.get<uint64_t>();
  call.object = in.get<uint32_t>();
  call.version = in.get<int64_t>();
  call.timeout = read_timeout(in);
  return call;
}

void DigestList::write(ByteWriter& out) const {
  out.put(static_cast<uint32_t>(digests.size()));
  for (const TensorDigest& digest : digests) {
    out.put_string(digest.name);
    out.put(digest.d0);
    out.put(digest.d1);
    out.put(digest.elements);
  }
}
DigestList DigestList::read(ByteReader& in) {
  DigestList list;
  list.digests.resize(in.get_count(kMaxTensors, 28));
  for (TensorDigest& digest : list.digests) {
    digest.name = in.get_string(kMaxNameBytes);
    digest.d0 = in.get<uint64_t>();
    digest.d1 = in.get<uint64_t>();
    digest.elements = in.get<int64_t>();
  }
  return list;
}

void TransferCommand::write(ByteWriter& out) const {
  out.put(batch);
  write_optional(version, out);
  write_timeout(timeout, out);
}
TransferCommand TransferCommand::read(ByteReader& in) {
  TransferCommand command;
  command.batch = in.get<uint32_t>();
  command.version = read_optional(in);
  command.timeout = read_timeout(in);
  return command;
}

void OperationState::write(ByteWriter& out) const {
  out.put(static_cast<uint8_t>(done));
  write_status(Status(status.code(), status.message().substr(0, kMaxStatusText)), out);
  out.put(version);
  write_progress(progress, out);
}
OperationState OperationState::read(ByteReader& in) {
  OperationState state;
  state.done = in.get_bool();
  state.status = read_status(in);
  state.version = in.get<int64_t>();
  state.progress = read_progress(in);
  return state;
}

void BatchState::write(ByteWriter& out) const {
  out.put(version);
  out.put(newest);
  out.put(static_cast<uint8_t>(torn));
  out.put(static_cast<uint8_t>(undecided));
}
BatchState BatchState::read(ByteReader& in) {
  BatchState state;
  state.version = in.get<int64_t>();
  state.newest = in.get<int64_t>();
  state.torn = in.get_bool();
  state.undecided = in.get_bool();
  return state;
}

void write_stats(const BatchStats& stats, ByteWriter& out) {
  for (const int64_t figure :
       {stats.tensors, stats.skipped, stats.routes, stats.bytes_moved, stats.bytes_lower_bound, stats.rank_bytes,
        stats.transfers, stats.sessions, stats.store_requests, stats.plans, stats.allocations, stats.quantized_elements,
        stats.quantized_bytes, stats.quantized_source_bytes, stats.quantized_elements_moved,
        stats.quantized_bytes_moved, stats.amax_exchanges})
    out.put(figure);
  for (const int64_t figure : {stats.delta_routes, stats.delta_bytes, stats.delta_full_bytes}) out.put(figure);
  out.put(stats.register_seconds);
}
BatchStats read_stats(ByteReader& in) {
  BatchStats stats;
  for (int64_t* figure :
       {&stats.tensors, &stats.skipped, &stats.routes, &stats.bytes_moved, &stats.bytes_lower_bound, &stats.rank_bytes,
        &stats.transfers, &stats.sessions, &stats.store_requests, &stats.plans, &stats.allocations,
        &stats.quantized_elements, &stats.quantized_bytes, &stats.quantized_source_bytes,
        &stats.quantized_elements_moved, &stats.quantized_bytes_moved, &stats.amax_exchanges})
    *figure = in.get<int64_t>();
  for (int64_t* figure : {&stats.delta_routes, &stats.delta_bytes, &stats.delta_full_bytes})
    *figure = in.get<int64_t>();
  stats.register_seconds = in.get<double>();
  return stats;
}

std::string agent_socket_name(const std::string& name_space, const std::string& job, Rank rank) {
  const std::string who = fmt::format("{}\n{}\n{}", name_space, job, rank);
  return fmt::format("agent-{:016x}", XXH3_64bits(who.data(), who.size()));
}

}  // namespace tessera::bus
