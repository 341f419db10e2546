#include "etp/parameter.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/fail.h"
#include "base/fields.h"
#include "layout/text_reader.h"

namespace tessera::etp {
namespace {

constexpr size_t kMaxNameBytes = 4096;
constexpr size_t kMaxTextBytes = 256;

void check_dtype(const WeightSpec& spec, const char* what, DType dtype) {
  if (!is_weight_dtype(dtype))
    fail(ErrorCode::kInvalidArgument, "{}: {} cannot be {}; use f32, bf16 or f16"_message, tessera::quoted(spec.name),
         what, to_string(dtype));
}

// What a rank tells of one weight. Everything but the memory must be equal on all ranks.
struct WeightRecord {
  std::string name;
  std::string description;
  collective::MemoryRef memory;

  static void fields(auto& f, auto& self) {
    f("name", self.name, kMaxNameBytes);
    f("description", self.description, kMaxTextBytes);
    f("arena", self.memory.arena);
    f("offset", self.memory.offset);
    f("bytes", self.memory.bytes);
  }
};

struct WeightRecords {
  std::vector<WeightRecord> weights;
  static void fields(auto& f, auto& self) { f("weights", self.weights, uint32_t{1} << 20); }
};

std::string describe(const ShardedWeight& w) {
  return fmt::format("[{}, {}] {} published as {}, gradients {}, alignment {}{}{}{}", w.spec.rows, w.spec.columns,
                     to_string(w.spec.dtype), to_string(w.format), to_string(w.gradient), w.sharding.alignment,
                     w.spec.frozen ? ", frozen" : "", w.spec.native ? ", native" : "",
                     w.spec.planes_only ? ", without a master" : "");
}

std::string blob_of(const WeightRecords& records) {
  ByteWriter out;
  FieldWriter writer(out);
  WeightRecords::fields(writer, records);
  const auto bytes = out.view();
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

WeightRecords records_of(const std::string& blob, const std::string& from) {
  const std::string what = fmt::format("weights of {}", from);
  ByteReader in(std::as_bytes(std::span(blob)), what);
  FieldReader reader(in);
  WeightRecords records;
  WeightRecords::fields(reader, records);
  in.finish();
  return records;
}

std::span<const std::byte> shown_memory(const Parameter& p) {
  if (p.weight.rows.empty()) return {};
  const device::Buffer& shown = p.weight.in_place ? *p.shard : *p.publication.planes;
  return {shown.data(), shown.bytes()};
}

void compare(const collective::Group& group, int rank, std::span<Parameter* const> mine, const WeightRecords& theirs) {
  if (theirs.weights.size() != mine.size())
    fail(ErrorCode::kMismatch, "{} starts with {} new weights, and {} with {}: add the same ones, in one order"_message,
         group.describe(group.rank()), mine.size(), group.describe(rank), theirs.weights.size());
  for (size_t i = 0; i < mine.size(); ++i) {
    const WeightRecord& record = theirs.weights[i];
    const ShardedWeight& weight = mine[i]->weight;
    const std::string own = describe(weight);
    if (record.name != weight.name())
      fail(ErrorCode::kMismatch, "weight {} is {} on {} and {} on {}: add the same ones, in one order"_message,
           weight.id, tessera::quoted(weight.name()), group.describe(group.rank()), tessera::quoted(record.name),
           group.describe(rank));
    if (record.description != own)
      fail(ErrorCode::kMismatch, "{} is {} on {} and {} on {}"_message, tessera::quoted(weight.name()), own,
           group.describe(group.rank()), tessera::quoted(record.description), group.describe(rank));
  }
}

// What is read of one owner's rows.
struct OwnerMemory {
  RowRange rows;
  const std::byte* data = nullptr;
};

std::shared_ptr<const collective::PublishedWeight> published(const Parameter& p, Plane plane,
                                                             std::span<const OwnerMemory> owners) {
  auto shown = std::make_shared<collective::PublishedWeight>();
  const ShardedWeight& weight = p.weight;
  shown->rows = weight.spec.rows;
  shown->columns = weight.columns();
  shown->plane = plane;
  if (weight.format.quantised()) {
    shown->spec = weight.format.spec();
    if (weight.format.needs_amax()) shown->amax = &p.publication.amax;
  } else {
    shown->dtype = weight.format.dtype();
  }
  for (const OwnerMemory& owner : owners) {
    collective::PublishedRows rows{.begin = owner.rows.begin, .count = owner.rows.size()};
    if (!owner.rows.empty() && shown->spec) {
      const QuantizedLayout layout =
          quantized_layout(*shown->spec, weight.format.planes(), 1, owner.rows.size(), weight.columns());
      const QuantizedLayout::Place& place = plane == Plane::kRow ? *layout.row : *layout.column;
      rows.plane = {.codes = owner.data + place.codes,
                    .code_stride = place.shape.code_row_bytes(),
                    .scales = owner.data + place.scales,
                    .scale_stride = place.shape.scale_row_bytes()};
    } else if (!owner.rows.empty()) {
      rows.data = owner.data;
    }
    shown->owners.push_back(rows);
  }
  collective::check_published(*shown, static_cast<int>(owners.size()), weight.name());
  return shown;
}

int64_t shown_bytes(const ShardedWeight& weight, int64_t rows) {
  if (rows == 0) return 0;
  if (!weight.format.quantised()) return bytes_of(weight.format.dtype(), rows * weight.columns());
  return quantized_layout(weight.format.spec(), weight.format.planes(), 1, rows, weight.columns()).bytes;
}

OwnerMemory owner_memory(collective::Group& group, int rank, const Parameter& p, const collective::MemoryRef& ref) {
  if (!p.weight.reads(rank)) return {};
  OwnerMemory owner{.rows = p.weight.rows_of(rank)};
  if (rank == group.rank()) {
    owner.data = shown_memory(p).data();
    return owner;
  }
  const auto bytes = static_cast<uint64_t>(shown_bytes(p.weight, owner.rows.size()));
  if (ref.bytes < bytes)
    fail(ErrorCode::kMismatch, "{} shows {} bytes of {}, whose {} rows there take {}"_message, group.describe(rank),
         ref.bytes, tessera::quoted(p.name()), owner.rows.size(), bytes);
  owner.data = group.map(rank, ref);
  return owner;
}

// Keeps the block that the shards of a stack are parts of.
class PartOfBlock final : public device::Buffer::Memory {
 public:
  explicit PartOfBlock(std::shared_ptr<device::Buffer> block) : block_(std::move(block)) {}

 private:
  std::shared_ptr<device::Buffer> block_;
};

std::unique_ptr<Parameter> make_parameter(ShardedWeight weight, device::Buffer shard, device::Device& device) {
  auto p = std::make_unique<Parameter>();
  p->weight = std::move(weight);
  p->shard = std::make_shared<device::Buffer>(std::move(shard));
  p->gradient.dtype = p->weight.accumulated;
  const ShardedWeight& w = p->weight;
  for (const Plane plane : {Plane::kRow, Plane::kColumn})
    p->wire_bytes[static_cast<size_t>(plane)] = w.format.wire_bytes(w.format.gathered(plane), w.spec.rows, w.columns());
  if (w.rows.empty() || w.in_place) return p;
  if (w.format.quantised())
    p->publication.layout = quantized_layout(w.format.spec(), w.format.planes(), 1, w.rows.size(), w.columns());
  *p->publication.planes =
      device.allocate(device::BufferKind::kShared, static_cast<size_t>(shown_bytes(w, w.rows.size())),
                      fmt::format("published {}", w.name()));
  return p;
}

}  // namespace

bool is_weight_dtype(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}

MatrixView Parameter::source() const {
  const void* data = weight.spec.native ? master : shard->data();
  const DType dtype = weight.spec.native ? master_dtype : weight.spec.dtype;
  return {.data = data,
          .dtype = dtype,
          .rows = weight.rows.size(),
          .columns = weight.columns(),
          .row_stride = weight.columns()};
}

std::string name_of_expert(const std::string& stack, int expert) {
  return fmt::format("{}[{}]", stack, expert);
}

ShardedWeight shard_weight(WeightId id, const WeightSpec& spec, int rank, int shards, const GraphScope& scope) {
  if (spec.name.empty() || spec.name.size() > kMaxNameBytes)
    fail(ErrorCode::kInvalidArgument, "a weight needs a name of 1 to {} bytes"_message, kMaxNameBytes);
  if (spec.rows < 1 || spec.columns < 1 || spec.rows > kMaxRows || spec.columns > kMaxRows / spec.rows)
    fail(ErrorCode::kInvalidArgument, "{}: [{}, {}] is not the shape of a weight"_message, tessera::quoted(spec.name),
         spec.rows, spec.columns);
  check_dtype(spec, "its dtype", spec.dtype);
  ShardedWeight weight;
  weight.id = id;
  weight.spec = spec;
  weight.format = spec.format.empty() ? WeightFormat(spec.dtype) : WeightFormat::parse(spec.format);
  if (spec.native && !weight.format.quantised())
    fail(ErrorCode::kInvalidArgument, "{}: a native weight needs a quantised format, not {}"_message,
         tessera::quoted(spec.name), to_string(weight.format));
  if (spec.planes_only && !(spec.native && spec.frozen))
    fail(ErrorCode::kInvalidArgument, "{}: only a native weight that is frozen can do without a master"_message,
         tessera::quoted(spec.name));
  weight.compute = spec.compute.value_or(weight.format.quantised() ? spec.dtype : weight.format.dtype());
  weight.gradient = spec.gradient.value_or(weight.compute);
  weight.accumulated = spec.accumulated.value_or(DType::kF32);
  check_dtype(spec, "the dtype of its gathered rows", weight.compute);
  check_dtype(spec, "the dtype of its gradients", weight.gradient);
  check_dtype(spec, "the dtype of its gradient rows", weight.accumulated);
  weight.sharding = shard_rows(spec.rows, shards, alignment_of(weight.format, spec.pad_for_alignment));
  weight.replica = rank / shards;
  weight.rows = weight.rows_of(rank);
  weight.chain = chain_of(spec.name, scope);
  weight.in_place = weight.format.in_place(spec.dtype) && !spec.native;
  weight.no_gather = shards == 1 && weight.in_place && weight.compute == spec.dtype;
  return weight;
}

bool is_whole_pages(const ShardedWeight& w) {
  static const int64_t page = ::sysconf(_SC_PAGESIZE);
  if (w.no_gather || w.format.quantised() || w.format.dtype() != w.compute) return false;
  const int64_t bytes = bytes_of(w.compute, w.sharding.per_rank * w.columns());
  return bytes % page == 0 && page <= static_cast<int64_t>(device::kSharedPage);
}

bool is_mapped(const ShardedWeight& w, const RuntimeOptions& options) {
  const bool inline_compute = options.compute == nullptr || options.compute->runs_inline();
  return options.map_weights && !options.check.value_or(false) && !options.gather_bytes_per_second && inline_compute &&
         !w.spec.copied && is_whole_pages(w) && bytes_of(w.compute, w.spec.rows * w.columns()) > options.inline_bytes;
}

std::unique_ptr<Parameter> make_parameter(ShardedWeight weight, device::Device& device) {
  const auto bytes = static_cast<size_t>(bytes_of(weight.spec.dtype, weight.elements()));
  device::Buffer shard;
  if (bytes > 0 && !weight.spec.native)
    shard = device.allocate(device::BufferKind::kShared, bytes, fmt::format("shard {}", weight.name()));
  return make_parameter(std::move(weight), std::move(shard), device);
}

std::vector<std::unique_ptr<Parameter>> make_stack(std::vector<ShardedWeight> weights, device::Device& device) {
  const ShardedWeight& first = weights.front();
  const size_t bytes = first.spec.native ? 0 : static_cast<size_t>(bytes_of(first.spec.dtype, first.elements()));
  auto block = std::make_shared<device::Buffer>();
  if (bytes > 0)
    *block = device.allocate(device::BufferKind::kShared, bytes * weights.size(),
                             fmt::format("shards {} and on", first.name()));
  std::vector<std::unique_ptr<Parameter>> made;
  for (ShardedWeight& weight : weights) {
    device::Buffer shard;
    if (bytes > 0)
      shard = {block->data() + bytes * made.size(), bytes, device::BufferKind::kShared,
               std::make_unique<PartOfBlock>(block)};
    made.push_back(make_parameter(std::move(weight), std::move(shard), device));
    made.back()->in_stack = true;
  }
  return made;
}

std::unique_ptr<Parameter> whole_of(std::span<Parameter* const> stack) {
  const Parameter& first = *stack.front();
  const auto count = static_cast<int64_t>(stack.size());
  auto whole = std::make_unique<Parameter>();
  whole->weight = first.weight;
  whole->weight.spec.rows *= count;
  whole->weight.sharding.padded += (count - 1) * first.weight.spec.rows;
  whole->shard = std::make_shared<device::Buffer>(first.shard->data(), first.shard->bytes() * stack.size(),
                                                  first.shard->kind(), std::make_unique<PartOfBlock>(first.shard));
  for (size_t i = 0; i < whole->wire_bytes.size(); ++i) whole->wire_bytes[i] = first.wire_bytes[i] * count;
  whole->weight.mapped = false;
  whole->first_expert = &first;
  return whole;
}

uint64_t version_of(const Parameter& p) {
  return (p.first_expert == nullptr ? p : *p.first_expert).publication.version;
}

void* gradient_rows(Parameter& p, device::Device& device) {
  if (p.gradient.data != nullptr || p.weight.rows.empty()) return p.gradient.data;
  p.gradient.dtype = p.weight.accumulated;
  const auto bytes = static_cast<size_t>(bytes_of(p.gradient.dtype, p.weight.elements()));
  if (!p.gradient.own) {
    p.gradient.own = device.allocate(device::BufferKind::kPrivate, bytes, fmt::format("gradient {}", p.weight.name()));
    std::memset(p.gradient.own.data(), 0, bytes);
  }
  p.gradient.data = p.gradient.own.data();
  return p.gradient.data;
}

void free_memory(Parameter& p) {
  p.started = false;
  p.freed = true;
  p.shard = std::make_shared<device::Buffer>();
  p.master = nullptr;
  p.publication.planes = std::make_shared<device::Buffer>();
  p.publication.row = p.publication.column = nullptr;
  p.publication.digests.clear();
  p.view = nullptr;
  p.gradient = {.own = {}, .data = nullptr, .dtype = p.weight.accumulated};
}

void exchange_memory(collective::Group& group, std::span<Parameter* const> parameters) {
  WeightRecords mine;
  for (const Parameter* p : parameters) {
    const auto memory = shown_memory(*p);
    mine.weights.push_back({.name = p->name(), .description = describe(p->weight), .memory = {}});
    if (!memory.empty()) mine.weights.back().memory = group.refer(memory.data(), memory.size());
  }
  const std::vector<std::string> blobs = group.exchange("weights", blob_of(mine));
  std::vector<WeightRecords> all;
  for (int q = 0; q < group.size(); ++q) {
    all.push_back(records_of(blobs[static_cast<size_t>(q)], group.describe(q)));
    compare(group, q, parameters, all.back());
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    Parameter& p = *parameters[i];
    std::vector<OwnerMemory> owners;
    for (int q = 0; q < group.size(); ++q)
      owners.push_back(owner_memory(group, q, p, all[static_cast<size_t>(q)].weights[i].memory));
    p.publication.row = published(p, Plane::kRow, owners);
    p.publication.column = p.weight.format.planes().column ? published(p, Plane::kColumn, owners) : p.publication.row;
    p.started = true;
  }
}

}  // namespace tessera::etp
