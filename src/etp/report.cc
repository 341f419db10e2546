// What a runtime holds, will hold, and why it waited.
#include <algorithm>
#include <map>

#include "base/fail.h"
#include "etp/model_forecast.h"
#include "etp/runtime_impl.h"
#include "etp/schedule/plan.h"
#include "etp/weight_view.h"
#include "layout/text_reader.h"

namespace tessera::etp {

WeightStatus RuntimeImpl::status(WeightId weight) const {
  const Parameter& p = context_.parameter(weight);
  const bool leased = p.view != nullptr && p.view->leased();
  WeightStatus status{
      .gather = std::string(to_string(leased ? WeightState::kDataReadySync : memory_->state_of(weight))),
      .reduction = std::string(to_string(gradients_.state_of(weight))),
      .prev = consumptions_.before(p),
      .next = consumptions_.after(p),
      .expert = std::nullopt,
      .chain = std::string(to_string(p.weight.chain))};
  if (p.experts != 0) status.expert = p.expert_index;
  return status;
}

RuntimeReport RuntimeImpl::report() const {
  RuntimeReport report = context_.counters;
  report.rank = context_.rank();
  report.size = context_.ranks();
  const CacheReport cache = memory_->report();
  std::map<std::string, int64_t, std::less<>> held;
  for (const CacheReport::Weight& weight : cache.weights) held[weight.name] = weight.held_bytes;
  for (const auto& p : context_.parameters) {
    if (p->freed) continue;
    const ShardedWeight& w = p->weight;
    const auto found = held.find(w.name());
    report.weights.push_back({.name = w.name(),
                              .rows = w.rows,
                              .version = static_cast<int64_t>(p->publication.version),
                              .chain = std::string(to_string(w.chain)),
                              .format = std::string(to_string(w.format)),
                              .frozen = w.spec.frozen,
                              .shard_bytes = static_cast<int64_t>(p->shard->bytes()),
                              .publication_bytes = static_cast<int64_t>(p->publication.planes->bytes()),
                              .master_bytes = p->master == nullptr ? 0 : bytes_of(p->master_dtype, w.elements()),
                              .gradient_bytes = static_cast<int64_t>(p->gradient.own.bytes()),
                              .gathered_bytes = found == held.end() ? 0 : found->second});
    const RuntimeReport::Weight& last = report.weights.back();
    report.shard_bytes += last.shard_bytes;
    report.publication_bytes += last.publication_bytes;
    report.master_bytes += last.master_bytes;
    report.gradient_bytes += last.gradient_bytes;
  }
  for (const CacheReport::Pool& pool : cache.pools)
    report.keys.push_back(
        {.key = to_string(pool.key), .bytes = pool.bytes, .peak_bytes = pool.most_held * pool.key.bytes()});
  report.mapped_bytes = consumptions_.mapped_bytes();
  report.gathered_bytes = cache.bytes + consumptions_.detached_bytes();
  report.gathered_peak_bytes = std::max(cache.most_bytes, report.gathered_bytes);
  report.produced_bytes = static_cast<int64_t>(pool_->bytes());
  report.produced_peak_bytes = static_cast<int64_t>(pool_->peak_bytes());
  report.captured_bytes = cache.captured_bytes + static_cast<int64_t>(captured_pool_->bytes());
  report.produced_bytes += static_cast<int64_t>(captured_pool_->bytes());
  report.produced_peak_bytes += static_cast<int64_t>(captured_pool_->peak_bytes());
  report.replicated_bytes = replicated_.bytes();
  const PredictorCounters& counters = consumptions_.counters();
  report.mispredicted = counters.wasted;
  report.refused += counters.refused;
  report.over_cap = cache.over_cap;
  return report;
}

RuntimeForecast RuntimeImpl::forecast() const {
  std::vector<ForecastWeight> weights;
  for (const auto& p : context_.parameters)
    if (!p->freed) weights.push_back(forecast_weight(*p));
  return forecast_rank({.weights = weights,
                        .rank = context_.rank() % context_.shards(),
                        .replicated_bytes = replicated_.forecast(),
                        .gathered_bytes = consumptions_.expected_plan().pool_bytes()});
}

std::string RuntimeImpl::explain(int64_t step) const {
  const ExposureLog& log = consumptions_.exposures();
  const std::vector<Exposure>* exposures = log.step(step);
  if (exposures == nullptr)
    fail(ErrorCode::kNotFound, "step {} is not kept: {} have ended, and the last two are"_message, step, log.steps());
  if (exposures->empty()) return "no gather was exposed\n";
  std::string text;
  for (const Exposure& exposure : *exposures)
    text += to_string(exposure, context_.parameters[exposure.weight]->name(), options_) + "\n";
  return text;
}

}  // namespace tessera::etp
