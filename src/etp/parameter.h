// One weight on this rank: how it is cut, where its rows lie, what peers read of it, and where its gradient is added.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "collective/group.h"
#include "collective/movement/gather.h"
#include "device/buffer.h"
#include "device/device.h"
#include "etp/schedule/chains.h"
#include "etp/schedule/sharding.h"
#include "etp/schedule/weight_format.h"
#include "tessera/etp.h"

namespace tessera::etp {

class WeightView;

bool is_weight_dtype(DType dtype);  // f32, bf16 or f16

// What is the same on all ranks, except `replica` and `rows`.
struct ShardedWeight {
  WeightId id = 0;  // its slot in the group
  WeightSpec spec;
  WeightFormat format;
  DType compute = DType::kF32;      // of gathered weights
  DType gradient = DType::kF32;     // of produced gradients
  DType accumulated = DType::kF32;  // of gradient rows, by default
  Sharding sharding;
  int replica = 0;  // this rank's; each has all rows
  RowRange rows;
  Chain chain = Chain::kUngraphed;
  bool in_place = true;    // peers read the shard itself
  bool no_gather = false;  // a replica has one rank, which reads the shard itself
  bool mapped = false;     // a use of it by itself reads the owners' memory

  const std::string& name() const { return spec.name; }
  int64_t columns() const { return spec.columns; }
  int64_t elements() const { return rows.size() * spec.columns; }
  RowRange rows_of(int rank) const { return sharding.rows_of(rank % sharding.ranks); }
  bool owns(int rank) const { return !rows_of(rank).empty(); }
  // Whether this rank gathers rows of that one.
  bool reads(int rank) const { return rank / sharding.ranks == replica && owns(rank); }
  int64_t gradient_bytes() const { return bytes_of(gradient, spec.rows * spec.columns); }
};

// Throws Error(kInvalidArgument), naming the weight, for a spec that cannot be.
// `rank` is that of a group of `shards * replicas` ranks.
ShardedWeight shard_weight(WeightId id, const WeightSpec& spec, int rank, int shards, const GraphScope& scope);
// Whether a gather of it would copy whole pages of each owner, and nothing else.
bool is_whole_pages(const ShardedWeight& weight);
// Whether it is mapped by a runtime with these options, which are resolved().
bool is_mapped(const ShardedWeight& weight, const RuntimeOptions& options);

// The published side: what this rank shows of its rows, and how it reads everybody's.
struct Publication {
  std::shared_ptr<device::Buffer> planes = std::make_shared<device::Buffer>();  // empty if in place
  QuantizedLayout layout;                                                       // of quantised planes in it
  float amax = 0;                                                               // of the whole weight, agreed on
  uint64_t version = 0;                                                         // shown last; 0: never
  bool stale = false;  // written since, and to be published at its first use
  // Whether the planes are those of the present rows, which no update is writing. Outlives the parameter.
  std::shared_ptr<std::atomic<bool>> current = std::make_shared<std::atomic<bool>>(false);
  std::shared_ptr<const collective::PublishedWeight> row;
  std::shared_ptr<const collective::PublishedWeight> column;  // `row` where there is one plane
  std::vector<uint64_t> digests;                              // of the shard's rows at publication; in check mode

  const std::shared_ptr<const collective::PublishedWeight>& of(Plane plane) const {
    return plane == Plane::kColumn ? column : row;
  }
};

// This rank's gradient rows.
struct GradientRows {
  device::Buffer own;    // made when it is first needed, unless the caller gives memory
  void* data = nullptr;  // where folds add
  DType dtype = DType::kF32;
  bool empty = false;  // the first fold writes what it finds there, and does not read it
};

struct Parameter {
  ShardedWeight weight;
  std::shared_ptr<device::Buffer> shard;  // empty buffer where there is no row, or for native weights
  const void* master = nullptr;           // of native weights; null while there is none
  DType master_dtype = DType::kF32;
  Publication publication;
  std::shared_ptr<WeightView> view;  // where it is mapped
  GradientRows gradient;
  std::array<int64_t, 2> wire_bytes{};  // of a gather of each plane
  bool started = false;                 // peers know it
  bool removed = false;                 // this rank uses it no more
  bool freed = false;                   // nor does any other: it has no memory, and is not started
  uint32_t experts = 0;                 // its list of experts, from 1; 0: none
  uint32_t expert_index = 0;
  bool in_stack = false;  // it is used by itself, too, and any buffer of its shape is as good as another
  // Of what stands for a stack where all of it is gathered into one buffer, [count * F, K]: the first expert, whose id
  // and version it has. It is no weight by itself.
  const Parameter* first_expert = nullptr;

  const std::string& name() const { return weight.name(); }
  // What is published: the shard's rows, or the master's.
  MatrixView source() const;
  // Whether its gradients are folded and it is published by updates.
  bool trained() const { return !weight.spec.frozen; }
};

// Of a stack.
std::string name_of_expert(const std::string& stack, int expert);  // "NAME[3]"

// With its shard, zeroed, and its publication buffer.
std::unique_ptr<Parameter> make_parameter(ShardedWeight weight, device::Device& device);

// The same of weights that differ in name and number only; the shards are parts of one block, one behind the other.
std::vector<std::unique_ptr<Parameter>> make_stack(std::vector<ShardedWeight> weights, device::Device& device);
// What stands for all of them. They must outlive it.
std::unique_ptr<Parameter> whole_of(std::span<Parameter* const> stack);
// That is published; of the whole of a stack, its first expert's.
uint64_t version_of(const Parameter& p);

// Where the runtime adds the weight's gradient; made, zeroed, at the first call.
void* gradient_rows(Parameter& parameter, device::Device& device);

// Lets its memory go: no rank uses it any more.
void free_memory(Parameter& parameter);

// Collective: tells all ranks where the memory of these weights lies, and compares what they must agree on. Throws
// Error(kMismatch) that names the weight and both values, on all ranks.
void exchange_memory(collective::Group& group, std::span<Parameter* const> parameters);

}  // namespace tessera::etp
