// The unsharded program.
#include <algorithm>
#include <map>
#include <utility>

#include "etp/testing/generated_math.h"
#include "etp/testing/generated_testing.h"

namespace tessera::etp {
namespace {

using namespace generated;

// What a use of the whole weight sees: published, gathered and decoded.
Floats seen(const WeightSpec& spec, const Floats& weight, Phase phase) {
  const WeightFormat format = spec.format.empty() ? WeightFormat(spec.dtype) : WeightFormat::parse(spec.format);
  const auto through = [](const Floats& values, DType dtype) {
    std::vector<std::byte> bytes(values.size() * 4);
    cast_row(DType::kF32, dtype)(values.data(), bytes.data(), values.size());
    return to_floats(bytes.data(), dtype, values.size());
  };
  if (!format.quantised()) return through(through(weight, format.dtype()), compute_of(spec));
  const MatrixView view{.data = weight.data(),
                        .dtype = DType::kF32,
                        .rows = spec.rows,
                        .columns = spec.columns,
                        .row_stride = spec.columns};
  const float amax = compute_amax({&view, 1})[0].value;
  const Plane plane = format.gathered(phase == Phase::kBackward ? Plane::kColumn : Plane::kRow);
  const QuantizedLayout layout = quantized_layout(format.spec(), format.planes(), 1, spec.rows, spec.columns);
  std::vector<std::byte> memory(static_cast<size_t>(layout.bytes));
  const auto at = [&](const std::optional<QuantizedLayout::Place>& place) -> PlaneMemory {
    if (!place) return {};
    return {.codes = memory.data() + place->codes,
            .code_stride = place->shape.code_row_bytes(),
            .scales = memory.data() + place->scales,
            .scale_stride = place->shape.scale_row_bytes()};
  };
  quantize(view, format.spec(), {.row = amax, .column = amax}, {.row = at(layout.row), .column = at(layout.column)});
  const PlaneMemory from = at(plane == Plane::kRow ? layout.row : layout.column);
  Floats decoded(weight.size());
  dequantize(format.spec(), plane, {from.codes, from.code_stride, from.scales, from.scale_stride}, amax,
             {.data = decoded.data(),
              .dtype = DType::kF32,
              .rows = spec.rows,
              .columns = spec.columns,
              .row_stride = spec.columns});
  return through(decoded, compute_of(spec));
}

// The rounds of one rank in an interval, as section "round" of the design says.
struct RankRounds {
  struct Uses {
    int announced = 0;
    int come = 0;
    Floats sum;
  };
  std::map<std::pair<uint32_t, int>, Uses> uses;
  std::map<uint32_t, std::vector<Floats>> rounds;

  void produce(const WeightSpec& spec, uint32_t weight, int micro_batch, Floats gradient) {
    Uses& use = uses[{weight, micro_batch}];
    gradient = rounded(std::move(gradient), gradient_dtype_of(spec));
    if (++use.come > 1) {
      for (size_t i = 0; i < gradient.size(); ++i) gradient[i] = use.sum[i] + gradient[i];
      gradient = rounded(std::move(gradient), gradient_dtype_of(spec));
    }
    use.sum = std::move(gradient);
    if (use.come < use.announced) return;
    rounds[weight].push_back(std::move(use.sum));
    uses.erase({weight, micro_batch});
  }
  void flush() {
    for (auto& [key, use] : uses)
      if (!use.sum.empty()) rounds[key.first].push_back(std::move(use.sum));
    uses.clear();
  }
};

class UnshardedTrainer {
 public:
  explicit UnshardedTrainer(const GeneratedModel& model)
      : model_(model),
        scale_(model.options.scale == GradientScale::kMean ? 1.0F / static_cast<float>(model.ranks) : 1),
        ranks_(static_cast<size_t>(model.ranks)) {}

  TrainingResult train() {
    result_ = room_for(model_);
    for (uint32_t w = 0; w < model_.weights.size(); ++w)
      for (size_t i = 0; i < weight(w).size(); ++i) weight(w)[i] = initial_value(w, static_cast<int64_t>(i));
    for (int step = 0; step < model_.steps; ++step) {
      for (Floats& gradient : result_.gradients) std::ranges::fill(gradient, 0.0F);
      for (int mb = 0; mb < model_.micro_batches; ++mb) {
        for (int r = 0; r < model_.ranks; ++r) pass(r, step, mb);
        if (model_.drain_each) drain();
      }
      drain();
      if (model_.evaluates)
        for (int r = 0; r < model_.ranks; ++r) evaluate(r);
      for (uint32_t w = 0; w < model_.weights.size(); ++w)
        for (size_t i = 0; i < weight(w).size(); ++i) weight(w)[i] = stepped(weight(w)[i], result_.gradients[w][i]);
    }
    return std::move(result_);
  }

 private:
  Floats& weight(uint32_t w) { return result_.weights[w]; }
  Floats seen_now(uint32_t w, Phase phase) { return seen(model_.weights[w], weight(w), phase); }

  void evaluate(int r) {
    float value = 1;
    for (const GeneratedModel::Layer& layer : model_.layers)
      for (const uint32_t w : layer.weights) value = forward(seen_now(w, Phase::kForward), value);
    result_.outputs[static_cast<size_t>(r)].push_back(value);
  }

  void pass(int r, int step, int mb) {
    RankRounds& rank = ranks_[static_cast<size_t>(r)];
    std::vector<float> output{input_of(r, step, mb)};
    for (size_t l = 0; l < model_.layers.size(); ++l) {
      float out = output.back();
      if (!model_.skipped(r, step, mb, l))
        for (const uint32_t w : model_.layers[l].weights) {
          out = forward(seen_now(w, Phase::kForward), out);
          if (!model_.weights[w].frozen) ++rank.uses[{w, mb}].announced;
        }
      output.push_back(out);
    }
    float above = 1;
    for (size_t l = model_.layers.size(); l-- > model_.backward_ends(r, step, mb);)
      if (!model_.skipped(r, step, mb, l)) backward_of(model_.layers[l], r, mb, output[l + 1], above);
    result_.outputs[static_cast<size_t>(r)].push_back(output.back());
    result_.outputs[static_cast<size_t>(r)].push_back(above);
  }

  void backward_of(const GeneratedModel::Layer& layer, int r, int mb, float& output, float& above) {
    for (const uint32_t w : layer.weights) {
      if (layer.recompute) output = forward(seen_now(w, Phase::kRecompute), output);
      if (layer.gathers_backward) above = backward(seen_now(w, Phase::kBackward), above);
      if (!model_.weights[w].frozen)
        ranks_[static_cast<size_t>(r)].produce(model_.weights[w], w, mb,
                                               gradient_of(weight(w).size(), output, above, r));
    }
  }

  void drain() {
    size_t most = 0;
    for (RankRounds& rank : ranks_) {
      rank.flush();
      for (const auto& [weight, rounds] : rank.rounds) most = std::max(most, rounds.size());
    }
    for (size_t j = 0; j < most; ++j)
      for (uint32_t w = 0; w < model_.weights.size(); ++w) fold(w, j);
    for (RankRounds& rank : ranks_) rank.rounds.clear();
  }

  void fold(uint32_t w, size_t round) {
    Floats& acc = result_.gradients[w];
    for (RankRounds& rank : ranks_) {
      const auto found = rank.rounds.find(w);
      if (found == rank.rounds.end() || found->second.size() <= round) continue;
      for (size_t i = 0; i < acc.size(); ++i) {
        const float term = found->second[round][i] * scale_;
        acc[i] = acc[i] + term;
      }
    }
    acc = rounded(std::move(acc), model_.weights[w].accumulated.value_or(DType::kF32));
  }

  const GeneratedModel& model_;
  const float scale_;
  std::vector<RankRounds> ranks_;
  TrainingResult result_;
};

}  // namespace

TrainingResult train_unsharded(const GeneratedModel& model) {
  return UnshardedTrainer(model).train();
}

}  // namespace tessera::etp
