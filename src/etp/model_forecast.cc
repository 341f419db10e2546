#include "etp/model_forecast.h"

#include <memory>
#include <string>
#include <utility>

#include "base/fail.h"
#include "etp/consumption.h"
#include "etp/gather_memory.h"
#include "etp/gradients/replicated.h"
#include "etp/runtime_impl.h"
#include "etp/schedule/plan.h"

namespace tessera::etp {
namespace {

// The weights of a model on one rank, without memory.
class ModelOnRank {
 public:
  ModelOnRank(int rank, int ranks, const RuntimeOptions& options)
      : rank_(rank), shards_(ranks / options.replicas), options_(options) {
    const std::vector<std::string> scope(options.graph_scope.begin(), options.graph_scope.end());
    scope_ = GraphScope::of(scope, options.moe_shared_expert_overlap);
  }

  // Returns the parameter, or the first one of a stack.
  Parameter& add(const ModelToShard::Weight& weight, uint32_t list) {
    std::vector<Parameter*> added;
    for (int i = 0; i < weight.count; ++i) {
      auto p = std::make_unique<Parameter>();
      WeightSpec spec = weight.spec;
      if (weight.count > 1) spec.name = name_of_expert(weight.spec.name, i);
      p->weight = shard_weight(static_cast<WeightId>(parameters_.size()), spec, rank_, shards_, scope_);
      p->weight.mapped = is_mapped(p->weight, options_);
      p->shard = std::make_shared<device::Buffer>();
      p->experts = list;
      p->expert_index = static_cast<uint32_t>(i);
      p->in_stack = weight.count > 1;
      added.push_back(p.get());
      parameters_.push_back(std::move(p));
    }
    if (weight.count > 1) stacks_.push_back(whole_of(added));
    return *added.front();
  }

  const Parameter& stack() const { return *stacks_.back(); }

  // What is gathered as one, in the order in which the first step is expected to use it.
  void use(std::vector<const Parameter*> buffers, bool experts) {
    const Parameter& first = *buffers.front();
    if (first.weight.no_gather) return;
    names_.push_back(first.name());
    costs_.push_back(gather_cost(buffers, experts, keys_));
  }

  std::vector<ForecastWeight> weights() const {
    std::vector<ForecastWeight> weights;
    for (const auto& p : parameters_) weights.push_back(forecast_weight(*p));
    return weights;
  }

  int64_t gathered_bytes() const {
    const std::vector<Consumption> uses = expected_step({.names = names_, .costs = costs_});
    return plan_prefetch(uses, costs_, prefetch_options(options_)).pool_bytes();
  }

 private:
  int rank_;
  int shards_;
  const RuntimeOptions& options_;
  GraphScope scope_;
  std::vector<std::unique_ptr<Parameter>> parameters_;
  std::vector<std::unique_ptr<Parameter>> stacks_;
  BufferKeys keys_;
  std::vector<std::string> names_;
  std::vector<GatherCost> costs_;
};

// Of each weight: its list of experts, from 1; 0: none.
std::vector<uint32_t> lists_of(const ModelToShard& model) {
  std::vector<uint32_t> lists(model.weights.size());
  for (size_t list = 0; list < model.lists.size(); ++list)
    for (const size_t weight : model.lists[list]) lists.at(weight) = static_cast<uint32_t>(list + 1);
  auto next = static_cast<uint32_t>(model.lists.size());
  for (size_t i = 0; i < lists.size(); ++i)
    if (model.weights[i].count > 1) lists[i] = ++next;
  return lists;
}

}  // namespace

ForecastWeight forecast_weight(const Parameter& p) {
  const ShardedWeight& w = p.weight;
  return {.sharding = w.sharding,
          .columns = w.columns(),
          .parameter = w.spec.dtype,
          .format = w.format,
          .wgrad = w.gradient,
          .accumulated = w.accumulated,
          .trained = p.trained(),
          .native = w.spec.native,
          .planes_only = w.spec.planes_only,
          .lent_gradient = p.gradient.data != nullptr && !p.gradient.own,
          .experts = p.experts};
}

RuntimeForecast forecast_model(const ModelToShard& model, int rank, int ranks, const RuntimeOptions& options) {
  if (ranks < 1 || rank < 0 || rank >= ranks)
    fail(ErrorCode::kInvalidArgument, "there is no rank {} of {}: ranks are 0 to {}"_message, rank, ranks, ranks - 1);
  const RuntimeOptions decided = resolved(options, ranks);
  ModelOnRank made(rank, ranks, decided);
  const std::vector<uint32_t> lists = lists_of(model);
  std::vector<Parameter*> firsts;
  for (size_t i = 0; i < model.weights.size(); ++i) {
    firsts.push_back(&made.add(model.weights[i], lists[i]));
    if (model.weights[i].count > 1)
      made.use({&made.stack()}, true);
    else if (lists[i] == 0)
      made.use({firsts.back()}, false);
  }
  for (const std::vector<size_t>& list : model.lists) {
    std::vector<const Parameter*> experts;
    for (const size_t weight : list) {
      firsts[weight]->expert_index = static_cast<uint32_t>(experts.size());
      experts.push_back(firsts[weight]);
    }
    made.use(std::move(experts), true);
  }
  const std::vector<ForecastWeight> weights = made.weights();
  return forecast_rank({.weights = weights,
                        .rank = rank % (ranks / decided.replicas),
                        .replicated_bytes = largest_bucket(model.replicated),
                        .gathered_bytes = made.gathered_bytes()});
}

}  // namespace tessera::etp
