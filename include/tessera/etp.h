// Extended Tensor Parallelism: each weight [F, K] lives as 1/N of its rows on each rank of a group. It is gathered just
// before a use, prefetched along the order of uses, and freed after it; its gradient is reduced to the owners of its
// rows while the backward goes on. docs/design/etp.md has the formulas, and says which bits are promised.
//
//   ShardGroup group = ShardGroup::over_store(*store, "run-7/etp", rank, size, {});
//   Runtime runtime(group, {});
//   WeightId w = runtime.add({.name = "wte.weight", .rows = 50257, .columns = 768});
//   load(runtime.shard(w), runtime.rows(w));         // this rank's rows, before start() or inside update()
//   runtime.start();                                 // collective: memory is exchanged, the first versions published
//
//   {
//     FullWeight full = runtime.acquire(w, Phase::kForward);            // [F, K]
//     gemm(x, full.data());
//   }                                                                   // its buffer returns to the cache
//   GradientBuffer gradient = runtime.gradient_buffer(w);               // [F, K], shared memory
//   wgrad(gradient.data());
//   runtime.produce(std::move(gradient));                               // the owners fold it; nothing waits here
//   runtime.drain();                                                    // collective: all gradients are folded
//   runtime.update(weights, [&] { step(optimiser); });                  // collective: retire, write, publish
//
// Collective calls are made by all ranks of the group in the same order, with the same weights: start(), update(),
// publish(), drain(), abandon(), classify(), and acquire() where it publishes (PublishAt::kFirstUse). Other calls are
// not: ranks may use weights in different orders, skip some, or stop early, without deadlock. Where the group's back
// end needs matched gathers, start() and update() throw kMismatch if ranks plan different orders for the next step.
//
// Thread-safety: a Runtime is used from any thread; calls exclude each other. FullWeight and GradientBuffer may be
// destroyed on any thread at any time, also after an update and after the Runtime.
// Blocking: calls that wait for other ranks do so for at most the group's timeout, and end with the exception that
// RuntimeOptions::while_waiting throws. Errors are tessera::Error: kDeadlineExceeded and kPeerLost name the rank and
// what was waited for, kMismatch names what ranks disagree about, kInvalidArgument names the weight, its state and the
// call.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/dtype.h"
#include "tessera/error.h"
#include "tessera/etp_report.h"
#include "tessera/quantize.h"

namespace tessera {
class Store;
}
namespace tessera::collective {
class Group;
}
namespace tessera::device {
class Device;
class Stream;
}  // namespace tessera::device

namespace tessera::etp {

// How an update begins.
struct UpdateOptions {
  std::string what = "an update";                     // for messages: "the step of AdamW"
  std::optional<std::chrono::nanoseconds> timeout{};  // of the waits for the other ranks; none: the group's
};

class CapturedStep;
class Consumptions;
class GatherMemory;
class GradientPool;
class Gradients;
class RuntimeImpl;
struct CapturedPart;

using WeightId = uint32_t;
inline constexpr std::chrono::nanoseconds kGroupTimeout = std::chrono::seconds(60);

// The ranks that share weights: processes of one host, or threads of one process. A handle; copies name the same group.
class ShardGroup {
 public:
  struct Options {
    std::string name = "etp";  // in messages and logs
    std::chrono::nanoseconds timeout = kGroupTimeout;
    uint32_t slots = uint32_t{1} << 16;  // weights at most
  };
  // Every rank calls it with its own blob and gets those of all ranks, in rank order.
  using Exchange = std::function<std::vector<std::string>(std::string blob)>;

  // Each blocks until all ranks have joined. Ranks on two hosts, or ranks that disagree about size or name, are errors.
  // Once `stop` is requested, over_store() ends with kCancelled; ranks that had come to forming the group get that
  // error.
  static ShardGroup over_store(Store& store, const std::string& key, int rank, int size, const Options& options,
                               std::stop_token stop = {});
  static ShardGroup over(const Exchange& exchange, int rank, int size, const Options& options);
  // A group of one rank.
  static ShardGroup single(const Options& options);
  // For tests, and threads of one process: the ranks of one group. Does not block.
  static std::vector<ShardGroup> in_process(int size, const Options& options);
  explicit ShardGroup(std::shared_ptr<collective::Group> group);  // of the layer below; its device must outlive it

  int rank() const;
  int size() const;
  // Tells the other ranks that this one leaves; what they wait for from it then fails with kPeerLost, "left".
  // Waits until they have left, too, at most for the timeout. Throws kDeadlineExceeded then.
  void close();
  // The same without waiting, of a rank that ends because of an error. Does not throw.
  void leave();
  const std::shared_ptr<collective::Group>& impl() const { return group_; }
  std::shared_ptr<const void> keeper() const;  // of its device

 private:
  std::shared_ptr<device::Device> device_;  // null: the group's maker owns it
  std::shared_ptr<collective::Group> group_;
};

// Why a weight is gathered. kRecompute: a forward inside a backward (activation checkpointing).
enum class Phase : uint8_t { kForward, kBackward, kRecompute };
std::string_view to_string(Phase phase);  // "forward", "backward", "recompute"

struct WeightSpec {
  std::string name = {};  // dotted; decides its chain (docs/design/etp.md)
  int64_t rows = 0;       // F and K, logical
  int64_t columns = 0;
  DType dtype = DType::kF32;  // of the shard: f32, bf16, f16
  // What travels: "f32", "bf16", "f16", or a quantised format: "fp8_e4m3", "fp8_block_128x128", "mxfp8", "nvfp4", ...
  // Empty: `dtype`, read by peers where the shard lies.
  std::string format = {};
  std::optional<DType> compute = {};      // of gathered weights; default: the plain dtype that travels, else `dtype`
  std::optional<DType> gradient = {};     // of produced gradients; default: that of gathered weights
  std::optional<DType> accumulated = {};  // of this rank's gradient rows: f32 (default) or bf16
  // Rows of a shard are a multiple of it, or of a quantised format's if that is larger; 0: no padding.
  int pad_for_alignment = 16;
  bool frozen = false;
  // The shard is its quantised planes. They are written at each publication, from the rows of set_master().
  bool native = false;
  // Of a native and frozen weight: no master is kept. What set_master() gives is read by the next publication only: by
  // start(), or by the update in which it is called.
  bool planes_only = false;
  // What a use gets is memory that it may write: rows are copied also where they could be mapped
  // (RuntimeOptions::map_weights).
  bool copied = false;
};

enum class PrefetchMode : uint8_t { kOn, kOff, kAuto /* off where this rank has fewer than two CPUs */ };
enum class PublishAt : uint8_t { kUpdate, kFirstUse };
enum class GradientScale : uint8_t { kMean /* 1 / (ranks of the group) */, kSum /* 1 */ };

struct RuntimeOptions {
  // Data parallelism: how often the group has the weights. Rank d * N + r of a group of N * replicas ranks keeps what
  // rank r of N keeps, and reads the rows of its replica d only. Gradients are folded over the whole group in the order
  // of its ranks, by every owner of their rows, so that all replicas get the same bits. Must divide the group's size.
  int replicas = 1;
  GradientScale scale = GradientScale::kMean;
  PrefetchMode prefetch = PrefetchMode::kAuto;
  int distance = 1;         // consumptions ahead
  int expert_distance = 2;  // the same for lists of experts
  // Of gathered weights, those in use and buffers that are kept for the next: a prefetch that does not fit is not
  // issued, and what is kept for other shapes is freed. Only what is used or captured at once can take more.
  std::optional<int64_t> cap_bytes = std::nullopt;
  // Gathers of fewer bytes are one operation for all owners, and are not handed to a stream if they wait for nobody: to
  // wake its thread takes longer.
  int64_t inline_bytes = int64_t{32} << 10;
  // Weights of more than `inline_bytes` that travel as they are computed with are not copied if each owner publishes
  // whole pages: a use reads the owners' memory, through one mapping. Copied are lists of experts, gathers that are
  // paced or captured, and all of them with `check`, or where `compute` runs beside the caller.
  bool map_weights = true;
  // When an updated weight with a format is quantised: at the end of the update, all in one list; or at its first use
  // in a micro-batch that says Use::first_micro_batch. Weights that are read in place are published by the update.
  PublishAt publish = PublishAt::kUpdate;
  bool coalesce_amax = true;  // of weights that are quantised together, in one exchange; else in one each. Same bits
  Nonfinite nonfinite = Nonfinite::kError;  // of rows that are quantised
  // Compares published rows with what the next update finds, and poisons released buffers. Unset: TESSERA_ETP_CHECK=1.
  std::optional<bool> check = std::nullopt;
  // The file that this rank's schedule is recorded in, until close(), for `tessera etp check` and `tessera etp trace`.
  // "{rank}" and "{group}" in it are replaced; it must have the first where the group has several ranks. A file that is
  // there is replaced. Empty: none. Unset: TESSERA_ETP_LOG, or none.
  std::optional<std::string> schedule_log = std::nullopt;
  // Paced streams, for measurements of overlap: a gather or fold takes at least as long as at this rate. Bytes are
  // those that travel, of all ranks' rows. `compute`, if given, is paced by its own link.
  std::optional<double> gather_bytes_per_second = std::nullopt;
  std::optional<double> reduce_bytes_per_second = std::nullopt;
  std::function<void()> while_waiting = {};  // called while a call waits; what it throws ends the call
  std::set<std::string> graph_scope = {};    // "attn", "moe", "moe_router", "mamba"
  bool moe_shared_expert_overlap = false;
  // Where weights are used. Default: the calling thread. REQUIRES: a stream of the group's device.
  std::shared_ptr<device::Stream> compute = {};
};

// How a weight is used, besides its phase.
struct Use {
  int micro_batch = 0;
  // Of a forward: a backward will produce a gradient for it. A round is produced once as many have come as were
  // announced; what several uses give is summed first, in the order it comes and the gradient's dtype.
  bool expects_backward = true;
  bool first_micro_batch = false;
  const float* noop = nullptr;  // of PublishAt::kFirstUse: while it is not 0, planes stay. The same on all ranks
  // Of a backward: the version that its forward used. Another one now is an error that names the weight.
  std::optional<int64_t> version = std::nullopt;
};

// A gathered weight [F, K], row-major and contiguous, at a multiple of 64 bytes. Its contents do not change while it
// lives, also where it is mapped: at the update of the weight, or at close(), it gets memory of its own, at the same
// address. To be read, unless WeightSpec::copied; a write to one that is mapped is a SIGSEGV. Move-only.
class FullWeight {
 public:
  FullWeight() = default;
  FullWeight(FullWeight&& other) noexcept;
  FullWeight& operator=(FullWeight&& other) noexcept;
  ~FullWeight();

  explicit operator bool() const { return data_ != nullptr; }
  const void* data() const { return data_; }
  DType dtype() const { return dtype_; }
  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }
  int64_t version() const { return version_; }
  void release() noexcept;  // as the destructor does

 private:
  friend class Consumptions;
  std::shared_ptr<GatherMemory> memory_;  // null for memory of the shards themselves
  std::shared_ptr<const void> keeper_;    // that memory, or the mapping
  const void* data_ = nullptr;
  uint32_t slot_ = 0;
  DType dtype_ = DType::kF32;
  int64_t rows_ = 0;
  int64_t columns_ = 0;
  int64_t version_ = 0;
};

// Room for a gradient [F, K], in shared memory, not initialised. Move-only; one that is dropped returns to its pool.
class GradientBuffer {
 public:
  GradientBuffer() = default;
  GradientBuffer(GradientBuffer&& other) noexcept;
  GradientBuffer& operator=(GradientBuffer&& other) noexcept;
  ~GradientBuffer();

  explicit operator bool() const { return data_ != nullptr; }
  void* data() const { return data_; }
  WeightId weight() const { return weight_; }
  int micro_batch() const { return micro_batch_; }
  DType dtype() const { return dtype_; }
  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }

 private:
  friend class Gradients;
  std::shared_ptr<GradientPool> pool_;
  void* data_ = nullptr;
  uint32_t entry_ = 0;
  WeightId weight_ = 0;
  int micro_batch_ = 0;
  DType dtype_ = DType::kF32;
  int64_t rows_ = 0;
  int64_t columns_ = 0;
};

// A round whose fold into this rank's rows has ended. Also told of weights of which this rank has no row.
struct Added {
  WeightId weight = 0;
  int64_t round = 0;  // of the weight, since the last drain
  int ranks = 0;      // that gave a gradient; 0: not known here, as this rank has no row
  bool operator==(const Added&) const = default;
};

// What of a weight is under way, as docs/design/etp.md calls it: "NONE", "ASYNC_WAIT", "DATA_READY", "DATA_READY_SYNC".
struct WeightStatus {
  std::string gather = {};
  std::string reduction = {};
  // Of its first forward use in a step: what is predicted to be used before and after it, from what the last one did.
  std::optional<WeightId> prev = std::nullopt;
  std::optional<WeightId> next = std::nullopt;
  std::optional<uint32_t> expert = std::nullopt;  // its place in a list of experts
  std::string chain = {};
};

// Where gathered weights of captures lie, instead of memory of the device. Called on any thread, once at a time.
struct CapturePool {
  std::function<std::byte*(int64_t bytes)> allocate;           // at a multiple of 64 bytes; throws if there is no room
  std::function<void(std::byte* memory, int64_t bytes)> free;  // must not throw
};

// A part of a step that Runtime::capture() has recorded. Move-only. It may be destroyed on any thread, also after the
// runtime; what its streams have been given then still runs. While it lives, the addresses of its gathered weights and
// gradients are kept for captures.
class CapturedStep {
 public:
  CapturedStep() = default;
  CapturedStep(CapturedStep&& other) noexcept;
  CapturedStep& operator=(CapturedStep&& other) noexcept;
  ~CapturedStep();

  explicit operator bool() const { return part_ != nullptr; }
  // Runs it once more: with the present versions of the weights, and gradients for the present rounds. `micro_batch` is
  // added to those that it was captured with. Not collective. Returns once its streams have been given everything; on
  // the calling thread's stream, once it has run. Waits as gradient_buffer() and acquire() do. Throws
  // Error(kInvalidArgument), with nothing done, in an update, for a weight that is not published or was frozen since,
  // inside of a capture, and once the runtime is closed. After another error, such as kPeerLost, it has run up to
  // there: as after a backward that failed, abandon() the interval; then it may be replayed again.
  void replay(int micro_batch = 0);
  // That the program gave to the stream of RuntimeOptions::compute.
  size_t operations() const;

 private:
  friend class Runtime;
  void reset() noexcept;

  std::weak_ptr<RuntimeImpl> runtime_;
  std::shared_ptr<CapturedPart> part_;
};

class Runtime {
 public:
  // Throws kInvalidArgument for options that do not go together, and for a group that has served another runtime.
  explicit Runtime(ShardGroup group, RuntimeOptions options = {});
  // As close().
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  // Weights ---------------------------------------------------------------------------------------------------------

  // All ranks add the same weights in the same order; start() compares. Its shard is there at once, zeroed.
  WeightId add(const WeightSpec& spec);
  // These weights are gathered, published and folded as one operation when they are used as a list; the first one
  // stands for them in the plan. Their specs are alike except for names.
  void add_experts(std::span<const WeightId> experts);
  // `count` weights, two at least: a list of experts "NAME[0]", "NAME[1]", ... whose shards lie one behind the other:
  // [count, rows(), K]. So do they where all are gathered: acquire() of the list gives one FullWeight, [count * F, K].
  // Of native ones, each has a master of its own.
  std::vector<WeightId> add_stack(const WeightSpec& spec, int count);
  // Not sharded; its gradients are folded at the drain. Returns its number.
  uint32_t add_replicated(const std::string& name, int64_t elements, DType dtype);
  // Collective; again after further add(): exchanges the memory of what is new and publishes its first version.
  void start();

  WeightSpec spec(WeightId weight) const;
  // Whether uses of it read the owners' memory. It may become false, where the process runs out of mappings.
  bool is_mapped(WeightId weight) const;
  RowRange rows(WeightId weight) const;
  int64_t shard_rows(WeightId weight) const;  // with padding, of every rank
  int64_t version(WeightId weight) const;     // published last; 0 before start()
  WeightStatus status(WeightId weight) const;
  // This rank's rows, [rows(), K] of WeightSpec::dtype. Written only before start() and inside update(). Null where
  // this rank has none, and for native weights.
  std::byte* shard(WeightId weight) const;
  // Keeps that memory after the runtime.
  std::shared_ptr<void> shard_keeper(WeightId weight) const;
  // The planes that are published of this rank's rows of a weight, or of each weight of a list, in its order: what the
  // tensor bus sends instead of quantising the rows (TensorSpec::quantized). They are current from a publication until
  // an update of the weight begins, or the runtime is closed. Null: nothing quantised is published of some weight here,
  // or RuntimeOptions::nonfinite lets through what the bus refuses.
  std::shared_ptr<const QuantizedCopy> quantized_copy(std::span<const WeightId> weights) const;
  // Of a native weight: what its planes are made from at each publication, [rows(), K]. Lives until the next call.
  // Where WeightSpec::planes_only, it lives until the publication, which all ranks prepare alike: an update writes
  // those of these weights for which it is called inside, on every rank and in one order, and leaves others as they
  // are.
  void set_master(WeightId weight, const void* rows, DType dtype);
  // What uses see of this rank's rows, as [rows(), K] of f32, bf16 or f16: of a quantised format, its planes, decoded.
  void read_rows(WeightId weight, void* to, DType dtype) const;
  // Where folds add: [rows(), K]. Not while a gradient of the weight is in flight. Null: the runtime's memory again.
  // `empty`: nothing is accumulated there yet; the first fold writes and does not read.
  void set_gradient(WeightId weight, void* rows, DType dtype, bool empty = false);
  // Those rows. The runtime's memory is made at the first call or fold, zeroed.
  void* gradient(WeightId weight);
  // Zeroes gradients that lie in the runtime's memory.
  void zero_gradients();
  // Frozen weights have no gradient. Not while one is in flight.
  void set_frozen(WeightId weight, bool frozen);
  // Chains by the new scope. Throws with the first three weights that are planned in another chain.
  void classify(const std::set<std::string>& graph_scope, bool moe_shared_expert_overlap);
  // This rank uses these weights no more, and does not name them again. Local. The end of the first drain or update
  // before which all ranks have said so frees their memory, on all of them; until then others may use them, and their
  // gradients are folded here. A FullWeight goes on showing what it shows. Numbers are not given again. Throws
  // Error(kInvalidArgument), with nothing done, in an update, while captures live, and while a gradient of one is in
  // flight; Error(kResourceExhausted) where there is no memory for what a FullWeight shows.
  void remove(std::span<const WeightId> weights);

  // A step ----------------------------------------------------------------------------------------------------------

  // Takes what was prefetched or gathers now, then prefetches what the plan predicts.
  FullWeight acquire(WeightId weight, Phase phase, const Use& use = {});
  std::vector<FullWeight> acquire(std::span<const WeightId> experts, Phase phase, const Use& use = {});

  // Waits for room only while all ranks follow the same order of gradients; otherwise the pool grows.
  GradientBuffer gradient_buffer(WeightId weight, int micro_batch = 0);
  // All of it is written. Never waits. A gradient that no forward use has announced is a round of its own, unless
  // `own_round` is false (a backward over a graph that has been used before): then it is summed with others of its
  // micro-batch until the drain.
  void produce(GradientBuffer gradient, bool own_round = true);
  void produce(std::span<GradientBuffer> experts);
  // Adds the gradients [elements] of a replicated tensor at the next drain to `accumulated`, on every rank that gives
  // that: acc = f32(accumulated) + f32(g_0) * scale + f32(g_1) * scale + ..., in rank order, rounded once. Both may be
  // the same memory: it then gets the sum only. Null `gradient`: this rank has none, and wants the sum of the others.
  // Both live until the drain. Where no rank gives a gradient, `accumulated` is left as it is.
  void give_replicated(uint32_t replicated, const void* gradient, void* accumulated, DType accumulated_dtype);
  // Returns how many ranks gave a gradient at the last drain, for each replicated tensor by its number.
  std::vector<int> replicated_ranks() const;
  // Rounds whose fold has ended since they were last asked for. Never waits.
  std::vector<Added> added();
  // Collective. Produces what is summed, waits until every gradient of every rank is folded, and folds replicated ones.
  // Returns what added() would. Throws kCancelled, after the same work, if a rank has called abandon().
  std::vector<Added> drain();
  // In place of drain(), by a rank whose backward failed. What it has produced cannot be withdrawn, as the others may
  // have folded it; what it has only summed is dropped. Every rank's drain() then throws kCancelled and names this
  // rank: gradients since the last drain are incomplete, to be zeroed, and the step repeated or skipped. Does not throw
  // for its own abandonment.
  // `lost`: gradients that it knows of. Returns whether a rank has lost any, or had produced some since the last drain.
  bool abandon(bool lost = false);

  // Collective. The first half drains, and waits until no rank reads the weights any longer; then shards may be
  // written. The second publishes their next version. Where that throws because values are not finite, nothing is
  // published and the update goes on: shards may be written again, and end_update() be called again, by all ranks.
  void begin_update(std::span<const WeightId> weights, const UpdateOptions& options = {});
  void end_update();
  template <typename Write>
  void update(std::span<const WeightId> weights, Write write) {
    begin_update(weights);
    write();
    end_update();
  }
  // Collective, outside of an update: a write in between, which is no step. `told` says what is to be written, and is
  // the same on all ranks only if they write the same: returns what all have told, in order of ranks. If that is the
  // same and `begins` holds, a write has begun: no rank reads the weights any longer, shards may be written, and
  // end_write() publishes them, those of PublishAt::kFirstUse, too; else nothing has changed. The options name it for
  // messages, alike on all ranks: a rank that makes another call is an error with both names on all of them, before
  // anything is written. One exchange; the plan of uses goes on behind it, and so do gradients that are under way.
  // Throws as begin_update() and end_update() do.
  std::vector<std::string> begin_write(std::span<const WeightId> weights, std::string told,
                                       const UpdateOptions& options = {.what = "a write"}, bool begins = true);
  void end_write();
  // Ends a step where begin_write()s have taken the place of its update: the next use begins another. Local, unless the
  // group's back end needs gathers in one order.
  void next_step();

  // Collective. Of PublishAt::kFirstUse: now, in place of the first use.
  void publish(std::span<const WeightId> weights, const float* noop = nullptr);

  // Captures --------------------------------------------------------------------------------------------------------

  // Calls `part`, which runs nothing: what it gives to the stream of RuntimeOptions::compute, and the weights that it
  // acquires and gradients that it produces, are recorded with their addresses, to be replayed. Computation that
  // is no operation of that stream happens once, now, with memory that holds nothing.
  //
  // `part` uses weights of the GRAPHED chain only, releases them before it returns, and produces only buffers that it
  // got inside. Use::version and first_micro_batch differ between replays, and are left out. Of the calls above, only
  // acquire(), gradient_buffer(), produce(), added() and those that only look may be made inside, by any thread; others
  // throw Error(kInvalidArgument). What `part` or one of its acquire() throws is thrown, and nothing is captured.
  //
  // In a replay, gathers run `distance` uses ahead, in the order of the capture and not beyond its ends; the plan of
  // other uses neither learns from it nor changes. Captures share their buffers, as replays run one after the other;
  // cap_bytes counts these, also between replays. A captured gradient is copied once, to a buffer that the owners may
  // read while the next replay writes.
  CapturedStep capture(const std::function<void()>& part);
  // Buffers of the GRAPHED chain come from `pool` from now on, and those that exist move there: between steps, and
  // before anything is captured; else throws Error(kInvalidArgument). `pool` is called until the last such buffer is
  // free: the runtime is closed and its FullWeights are released.
  void reallocate(CapturePool pool);

  std::vector<StreamInfo> streams() const;  // those that exist
  // Waits for what the streams of a chain ("GRAPHED", "UNGRAPHED"; empty: both) were given: gathers, or reductions,
  // which wait for other ranks' gradients. Throws what one of them failed with. Not collective.
  void synchronize(std::string_view chain, bool gathers);
  RuntimeReport report() const;
  RuntimeForecast forecast() const;
  // Which gathers of a step (counted in updates; -1: the last whole one) were exposed, which dependency each waited
  // for, and the smallest change that would hide it. Text of one line each.
  std::string explain(int64_t step = -1) const;

  // Ends the streams, after what they were given. Idempotent; other calls fail from then on. Not collective: a rank
  // that waits for this one after that gets kPeerLost.
  void close();

 private:
  std::shared_ptr<RuntimeImpl> impl_;
};

}  // namespace tessera::etp
