#include "etp/runtime_impl.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/config.h"
#include "base/fail.h"
#include "base/log.h"
#include "base/process.h"
#include "codec/simd/fold.h"
#include "collective/leftovers.h"
#include "collective/movement/copy_rows.h"
#include "device/link.h"
#include "etp/schedule/planned_order.h"
#include "layout/text_reader.h"

namespace tessera::etp {
namespace {

constexpr Duration kStreamsEnd = std::chrono::seconds(5);

GraphScope scope_of(const std::set<std::string>& names, bool overlap) {
  const std::vector<std::string> list(names.begin(), names.end());
  return GraphScope::of(list, overlap);
}

// What is not prefetched is gathered by the caller, and paced all the same.
std::shared_ptr<device::Stream> compute_of(const RuntimeOptions& options, device::Device& device) {
  if (options.compute != nullptr) return options.compute;
  if (!options.gather_bytes_per_second) return device.caller();
  const auto link = std::make_shared<device::Link>(*options.gather_bytes_per_second);
  return device.make_stream({.name = "compute", .link = link, .runs_inline = true});
}

RuntimeContext make_context(const ShardGroup& group, const RuntimeOptions& options) {
  collective::Group& ranks = *group.impl();
  return {.group = ranks,
          .device = ranks.device(),
          .options = options,
          .check = options.check.value_or(false),
          .maps = !ranks.backend().needs_matched_order,
          .compute = compute_of(options, ranks.device()),
          .streams = SideStreams(ranks, options),
          .scope = scope_of(options.graph_scope, options.moe_shared_expert_overlap)};
}

// Null if there is to be none.
std::unique_ptr<ScheduleLog> log_of(const RuntimeOptions& options, collective::Group& group) {
  if (options.schedule_log->empty()) return nullptr;
  return std::make_unique<ScheduleLog>(schedule_log_path(*options.schedule_log, group), group);
}

}  // namespace

RuntimeOptions resolved(RuntimeOptions options, int ranks) {
  if (options.prefetch == PrefetchMode::kAuto)
    options.prefetch = usable_cpus() / ranks >= 2 ? PrefetchMode::kOn : PrefetchMode::kOff;
  Config::require_valid();
  if (!options.check) options.check = Config::get().etp_check == "1";
  if (!options.schedule_log) options.schedule_log = Config::get().etp_log;
  for (const auto& rate : {options.gather_bytes_per_second, options.reduce_bytes_per_second})
    if (rate && !(*rate > 0))
      fail(ErrorCode::kInvalidArgument, "a stream cannot be paced to {} bytes a second"_message, *rate);
  if (options.replicas < 1 || ranks % options.replicas != 0)
    fail(ErrorCode::kInvalidArgument, "a group of {} ranks cannot be {} replicas of one size"_message, ranks,
         options.replicas);
  if (options.inline_bytes < 0)
    fail(ErrorCode::kInvalidArgument, "inline_bytes is {}, and at least 0"_message, options.inline_bytes);
  scope_of(options.graph_scope, options.moe_shared_expert_overlap);
  return options;
}

RuntimeImpl::RuntimeImpl(ShardGroup group, RuntimeOptions options)
    : group_(std::move(group)),
      options_(resolved(std::move(options), group_.size())),
      context_(make_context(group_, options_)),
      schedule_log_(log_of(options_, *group_.impl())),
      memory_(std::make_shared<GatherMemory>(group_.keeper(), context_.device, context_.compute,
                                             GatherMemory::Options{context_.check, options_.cap_bytes})),
      pool_(std::make_shared<GradientPool>(group_.keeper(), context_.device, device::BufferKind::kShared,
                                           context_.check)),
      // Not poisoned: a replay may still write what a capture returns.
      captured_pool_(
          std::make_shared<GradientPool>(group_.keeper(), context_.device, device::BufferKind::kPrivate, false)),
      publisher_(context_),
      consumptions_(context_, memory_, std::make_shared<WeightView::Shared>(group_.keeper(), context_.device)),
      gradients_(context_, pool_, captured_pool_),
      replicated_(context_),
      reading_(context_.group.reading()) {
  context_.group.claim();
}

RuntimeImpl::~RuntimeImpl() {
  const MutexLock lock(mutex_);
  close();
}

RuntimeImpl::Call::Call(RuntimeImpl& runtime, const char* call)
    : checked_(runtime.require_own_process()), lock_(runtime.mutex_) {
  runtime.require_open();
  runtime.forget_dropped();
  if (call != nullptr && runtime.capturing_ != nullptr)
    fail(ErrorCode::kInvalidArgument, "{} cannot be part of a capture: call it before or after"_message, call);
  if (runtime.options_.while_waiting)
    hook_.emplace(
        [](void* called) {
          const auto& waiting = *static_cast<const RuntimeImpl*>(called);
          waiting.options_.while_waiting();
          waiting.group_.impl()->hear_refusal();
        },
        &runtime);
}

bool RuntimeImpl::require_own_process() const {
  if (!in_own_process())
    fail(ErrorCode::kInvalidArgument,
         "sharded weights are used in a forked child of the rank that has them, without their memory and threads: use "
         "them in the rank itself, or spawn"_message);
  return true;
}

void RuntimeImpl::require_open() const {
  if (closed_) fail(ErrorCode::kInvalidArgument, "the runtime is closed"_message);
}

// What was enqueued there may still touch buffers.
void RuntimeImpl::await_compute() {
  if (context_.compute->runs_inline()) return;
  try {
    context_.device.wait_host(context_.compute->record(), context_.group.deadline());
  } catch (...) {  // it has failed, which its owner learns from the stream
  }
}

void RuntimeImpl::close() {
  if (std::exchange(closed_, true)) return;
  for (const auto& p : context_.parameters) p->publication.current->store(false);  // whoever has rows may write them
  context_.streams.close(Deadline::after(kStreamsEnd));
  context_.group.finish();  // it publishes and folds nothing any more
  await_compute();
  consumptions_.close();
  reading_.reset();
  keep_published();
  memory_->close();
  pool_->close();
  captured_pool_->close();
  schedule_log_.reset();
}

// Other ranks may still read it, and go on doing so where this one has closed its runtime first.
void RuntimeImpl::keep_published() {
  struct Published {
    std::shared_ptr<const void> device;
    std::vector<std::shared_ptr<const device::Buffer>> buffers;
  };
  try {
    const auto published = std::make_shared<Published>(Published{group_.keeper(), {}});
    if (published->device == nullptr) return;  // it may go before they do
    for (const auto& p : context_.parameters) {
      published->buffers.push_back(p->shard);
      published->buffers.push_back(p->publication.planes);
    }
    collective::Leftovers::of_process().keep(context_.group.readers(), published);
  } catch (const std::exception& error) {  // no memory is left
    log_event(LogLevel::warn, "publication.freed", {}, "what others read of a closed runtime is freed: {}"_message,
              error.what());
  }
}

// Weights -------------------------------------------------------------------------------------------------------------

void RuntimeImpl::require_slots(const std::string& name, size_t count) const {
  const size_t last = context_.parameters.size() + count;
  if (last > context_.group.slots())
    fail(ErrorCode::kResourceExhausted,
         "{} is weight {}, and the group has room for {}: raise ShardGroup::Options::slots"_message,
         tessera::quoted(name), last, context_.group.slots());
}

WeightId RuntimeImpl::add(const WeightSpec& spec) {
  require_slots(spec.name, 1);
  const auto id = static_cast<WeightId>(context_.parameters.size());
  return add(
      make_parameter(shard_weight(id, spec, context_.rank(), context_.shards(), context_.scope), context_.device));
}

WeightId RuntimeImpl::add(std::unique_ptr<Parameter> parameter) {
  parameter->weight.mapped = context_.maps && is_mapped(parameter->weight, options_);
  context_.parameters.push_back(std::move(parameter));
  consumptions_.add(*context_.parameters.back());
  gradients_.add(*context_.parameters.back());
  return context_.parameters.back()->weight.id;
}

std::vector<WeightId> RuntimeImpl::add_stack(const WeightSpec& spec, int count) {
  if (count < 2) fail(ErrorCode::kInvalidArgument, "a list of experts has at least two weights"_message);
  require_slots(spec.name, static_cast<size_t>(count));
  std::vector<ShardedWeight> experts;
  for (int i = 0; i < count; ++i) {
    WeightSpec expert = spec;
    expert.name = name_of_expert(spec.name, i);
    const auto id = static_cast<WeightId>(context_.parameters.size() + experts.size());
    experts.push_back(shard_weight(id, expert, context_.rank(), context_.shards(), context_.scope));
  }
  std::vector<WeightId> ids;
  for (std::unique_ptr<Parameter>& p : make_stack(std::move(experts), context_.device))
    ids.push_back(add(std::move(p)));
  add_experts(ids, true);
  return ids;
}

std::vector<Parameter*> RuntimeImpl::list_of(std::span<const WeightId> weights) const {
  std::vector<Parameter*> list;
  for (const WeightId weight : weights) list.push_back(&context_.parameter(weight));
  return list;
}

void RuntimeImpl::add_experts(std::span<const WeightId> experts, bool stacked) {
  const std::vector<Parameter*> list = list_of(experts);
  if (list.size() < 2) fail(ErrorCode::kInvalidArgument, "a list of experts has at least two weights"_message);
  const WeightSpec& first = list.front()->weight.spec;
  for (const Parameter* p : list) {
    const WeightSpec& spec = p->weight.spec;
    if (p->experts != 0)
      fail(ErrorCode::kInvalidArgument, "{} is in a list of experts already"_message, tessera::quoted(spec.name));
    if (p->weight.format != list.front()->weight.format || p->weight.compute != list.front()->weight.compute ||
        p->weight.chain != list.front()->weight.chain)
      fail(ErrorCode::kInvalidArgument,
           "{} and {} cannot be in one list of experts: format, dtype and chain must be equal"_message,
           tessera::quoted(first.name), tessera::quoted(spec.name));
  }
  context_.experts.push_back(list);
  for (size_t i = 0; i < list.size(); ++i) {
    list[i]->experts = static_cast<uint32_t>(context_.experts.size());
    list[i]->expert_index = static_cast<uint32_t>(i);
  }
  if (stacked) context_.stacks.push_back(whole_of(list));
  consumptions_.add_experts(list, stacked ? context_.stacks.back().get() : nullptr);
}

void RuntimeImpl::agree_on_options() {
  if (std::exchange(options_agreed_, true)) return;
  const std::string mine = fmt::format("{} of gradients, weights published at {}, {} replica(s), amaxes exchanged {}",
                                       options_.scale == GradientScale::kMean ? "the mean" : "the sum",
                                       options_.publish == PublishAt::kUpdate ? "the update" : "their first use",
                                       options_.replicas, options_.coalesce_amax ? "together" : "one by one");
  const std::vector<std::string> all = context_.group.exchange("options", mine);
  for (int q = 0; q < context_.ranks(); ++q)
    if (all[static_cast<size_t>(q)] != mine)
      fail(ErrorCode::kMismatch, "{} takes {}, and {} takes {}"_message, context_.group.describe(context_.rank()), mine,
           context_.group.describe(q), tessera::quoted(all[static_cast<size_t>(q)]));
}

void RuntimeImpl::agree_on_order() {
  const collective::BackendTraits backend = context_.group.backend();
  if (!backend.needs_matched_order) return;
  const std::string mine = consumptions_.expected_order(gradients_.expected_order());
  const std::vector<std::string> digests = context_.group.exchange("plan", fmt::format("{:x}", digest_of(mine)));
  if (std::ranges::all_of(digests, [&](const std::string& digest) { return digest == digests.front(); })) return;
  const std::vector<std::string> orders = context_.group.exchange("planned order", mine);
  for (int q = 1; q < context_.ranks(); ++q)
    if (const auto difference = first_difference(orders.front(), orders[static_cast<size_t>(q)]))
      fail(
          ErrorCode::kMismatch,
          "move {} of the next step is {} on {} and {} on {}: all ranks must gather and fold in one order over {}; use "
          "the same weights in the same order, with the same options"_message,
          difference->line, tessera::quoted(difference->first), context_.group.describe(0),
          tessera::quoted(difference->second), context_.group.describe(q), backend.name);
}

void RuntimeImpl::start() {
  agree_on_options();
  std::vector<Parameter*> fresh;
  for (const auto& p : context_.parameters)
    if (!p->started && !p->removed) fresh.push_back(p.get());
  exchange_memory(context_.group, fresh);
  consumptions_.map(fresh);
  gradients_.start();
  for (const Parameter* p : fresh) context_.note_host_write("load", *p, p->shard->data(), p->shard->bytes());
  publish_with_masters(fresh);
  agree_on_order();
}

void RuntimeImpl::publish_with_masters(std::span<Parameter* const> weights) {
  publisher_.publish(weights);
  for (Parameter* p : weights)
    if (p->weight.spec.planes_only) p->master = nullptr;
}

void RuntimeImpl::set_master(WeightId weight, const void* rows, DType dtype) {
  Parameter& p = context_.parameter(weight);
  if (!p.weight.spec.native)
    fail(ErrorCode::kInvalidArgument, "{} is not native: its shard is what is published"_message,
         tessera::quoted(p.name()));
  const bool joins = p.weight.spec.planes_only && p.started;
  if (joins && !in_update_)
    fail(ErrorCode::kInvalidArgument,
         "{} has no master, and is given one outside of an update: call begin_update()"_message,
         tessera::quoted(p.name()));
  p.master = rows;
  p.master_dtype = dtype;
  p.publication.current->store(false);
  if (joins && std::ranges::find(updating_, &p) == updating_.end()) updating_.push_back(&p);
}

void RuntimeImpl::read_rows(WeightId weight, void* to, DType dtype) const {
  const Parameter& p = context_.started(weight);
  if (!is_weight_dtype(dtype))
    fail(ErrorCode::kInvalidArgument, "{}: rows cannot be read as {}; use f32, bf16 or f16"_message,
         tessera::quoted(p.name()), to_string(dtype));
  const collective::PublishedWeight& published = *p.publication.row;
  collective::PublishedRows own = published.owners[static_cast<size_t>(context_.rank())];
  own.begin = 0;
  collective::copy_rows(
      published, own,
      {.data = to, .dtype = dtype, .rows = own.count, .columns = p.weight.columns(), .row_stride = p.weight.columns()},
      false);
}

std::shared_ptr<const QuantizedCopy> RuntimeImpl::quantized_copy(std::span<const WeightId> weights) const {
  auto copy = std::make_shared<QuantizedCopy>();
  std::vector<std::shared_ptr<const device::Buffer>> planes;
  std::vector<std::shared_ptr<const std::atomic<bool>>> current;
  for (const WeightId weight : weights) {
    const Parameter& p = context_.parameter(weight);
    const WeightFormat& format = p.weight.format;
    if (!format.quantised() || p.weight.rows.empty() || options_.nonfinite == Nonfinite::kPropagate) return nullptr;
    copy->format = format.format();
    copy->planes = format.planes();
    copy->matrices.push_back(p.publication.planes->data());
    planes.push_back(p.publication.planes);
    current.push_back(p.publication.current);
  }
  copy->current = [current = std::move(current)] {
    return std::ranges::all_of(current, [](const auto& each) { return each->load(); });
  };
  struct Kept {
    std::shared_ptr<const void> device;
    std::vector<std::shared_ptr<const device::Buffer>> planes;
  };
  copy->keeper = std::make_shared<Kept>(Kept{group_.keeper(), std::move(planes)});
  return weights.empty() ? nullptr : copy;
}

void RuntimeImpl::set_gradient(WeightId weight, void* rows, DType dtype, bool empty) {
  Parameter& p = context_.parameter(weight);
  if (gradients_.in_flight(weight))
    fail(ErrorCode::kInvalidArgument, "{} has a gradient in flight: drain() first"_message, tessera::quoted(p.name()));
  if (!foldable(dtype))
    fail(ErrorCode::kInvalidArgument, "{}: gradient rows cannot be {}; use f32, bf16 or f16"_message,
         tessera::quoted(p.name()), to_string(dtype));
  p.gradient = {.own = {}, .data = rows, .dtype = rows == nullptr ? p.weight.accumulated : dtype, .empty = empty};
}

void* RuntimeImpl::gradient(WeightId weight) {
  return gradient_rows(context_.parameter(weight), context_.device);
}

void RuntimeImpl::zero_gradients() {
  for (const auto& p : context_.parameters) {
    device::Buffer& own = p->gradient.own;
    if (!own) continue;
    if (gradients_.in_flight(p->weight.id))
      fail(ErrorCode::kInvalidArgument, "{} has a gradient in flight: drain() first"_message,
           tessera::quoted(p->name()));
    context_.note_host_write("zero", *p, own.data(), own.bytes());
    std::memset(own.data(), 0, own.bytes());
  }
}

void RuntimeImpl::set_frozen(WeightId weight, bool frozen) {
  Parameter& p = context_.parameter(weight);
  if (gradients_.in_flight(weight))
    fail(ErrorCode::kInvalidArgument, "{} has a gradient in flight: drain() first"_message, tessera::quoted(p.name()));
  if (!frozen && p.weight.spec.planes_only)
    fail(ErrorCode::kInvalidArgument, "{} has no master, and is not trained without one: it stays frozen"_message,
         tessera::quoted(p.name()));
  p.weight.spec.frozen = frozen;
}

void RuntimeImpl::classify(const std::set<std::string>& names, bool overlap) {
  if (context_.captures > 0)
    fail(ErrorCode::kInvalidArgument, "chains change while {} captures of them live: destroy those first"_message,
         context_.captures);
  const GraphScope scope = scope_of(names, overlap);
  std::vector<std::string> weights;
  std::vector<std::optional<Chain>> planned;
  for (const auto& p : context_.parameters) {
    weights.push_back(p->name());
    const bool planned_before = !p->removed && consumptions_.planned(*p);
    planned.push_back(planned_before ? std::optional(p->weight.chain) : std::nullopt);
  }
  const std::vector<Chain> chains = classify_chains(weights, scope, planned);
  for (size_t i = 0; i < chains.size(); ++i) context_.parameters[i]->weight.chain = chains[i];
  context_.scope = scope;
  consumptions_.rebuild();
}

void RuntimeImpl::remove(std::span<const WeightId> weights) {
  if (in_update_)
    fail(ErrorCode::kInvalidArgument, "weights are removed inside an update: remove them before or after"_message);
  if (context_.captures > 0)
    fail(ErrorCode::kInvalidArgument, "weights are removed while {} captures of them live: destroy those first"_message,
         context_.captures);
  const std::vector<Parameter*> list = list_of(weights);
  for (const Parameter* p : list)
    if (gradients_.in_flight(p->weight.id))
      fail(ErrorCode::kInvalidArgument, "{} has a gradient in flight: drain() first"_message,
           tessera::quoted(p->name()));
  consumptions_.remove(list);
  for (Parameter* p : list) {
    p->removed = true;
    p->master = nullptr;  // its owner may free it now
    p->publication.digests.clear();
    p->publication.current->store(false);
    // Where others go on using it.
    p->gradient.data = p->gradient.own ? p->gradient.own.data() : nullptr;
    p->gradient.empty = false;
    p->gradient.dtype = p->weight.accumulated;
    if (p->started)
      removed_.push_back(p);
    else
      free(*p);  // no other rank knows it
  }
}

void RuntimeImpl::free_removed(std::span<const IntervalEnd> ends) {
  const auto tells = [](const IntervalEnd& end, const Parameter& p) {
    return std::ranges::find(end.removed, p.weight.id) != end.removed.end();
  };
  std::vector<Parameter*> kept;
  for (Parameter* p : removed_) {
    if (std::ranges::all_of(ends, [&](const IntervalEnd& end) { return tells(end, *p); }))
      free(*p);
    else
      kept.push_back(p);
  }
  removed_ = std::move(kept);
}

void RuntimeImpl::free(Parameter& p) {
  for (const auto& whole : context_.stacks)
    if (whole->first_expert == &p) whole->shard = std::make_shared<device::Buffer>();
  free_memory(p);
}

}  // namespace tessera::etp
