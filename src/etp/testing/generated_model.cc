#include <fmt/format.h>

#include <cstring>
#include <random>
#include <string_view>

#include "etp/schedule/chains.h"
#include "etp/testing/generated_math.h"
#include "etp/testing/generated_testing.h"

namespace tessera::etp {

using generated::mixed;

namespace {

constexpr const char* kFormats[] = {"", "", "", "bf16", "mxfp8", "nvfp4", "fp8_e4m3", "fp8_block_128x128"};

bool is_quantised(std::string_view format) {
  return !format.empty() && format != "bf16";
}

}  // namespace

GeneratedModel GeneratedModel::of(uint64_t seed) {
  std::mt19937_64 random(seed * 2654435761 + 17);
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
  GeneratedModel model;
  model.seed = seed;
  model.ranks = draw(1, 4);
  model.steps = draw(2, 4);
  model.micro_batches = draw(0, 5) == 0 ? draw(5, 9) : draw(1, 3);
  model.drain_each = draw(0, 2) > 0;
  model.evaluates = draw(0, 3) == 0;
  model.skips = draw(0, 1) == 0;
  model.async_compute = draw(0, 1) == 0;
  model.maps = mixed(seed, 0, 12, 0) % 4 == 0;
  const int depth = draw(1, 6);
  for (int l = 0; l < depth; ++l) {
    Layer layer;
    const bool experts = draw(0, 3) == 0;
    if (!experts && l > 1 && draw(0, 4) == 0) {
      layer = model.layers[static_cast<size_t>(draw(0, l - 1))];  // tied
    } else {
      WeightSpec spec{.rows = draw(1, 70), .columns = draw(1, 6) * 4, .format = kFormats[draw(0, 7)]};
      if (!model.weights.empty() && draw(0, 1) == 0) {  // weights that share buffers
        spec.rows = model.weights.back().rows;
        spec.columns = model.weights.back().columns;
        spec.format = model.weights.back().format;
      }
      if (model.maps && spec.format.empty()) spec.columns = 64;  // 16 rows are a page
      if (spec.format == "bf16" && draw(0, 1) == 0) spec.compute = DType::kF32;
      if (draw(0, 4) == 0) spec.gradient = DType::kBF16;
      if (draw(0, 6) == 0) spec.accumulated = DType::kBF16;
      spec.frozen = draw(0, 6) == 0;
      spec.native = is_quantised(spec.format) && mixed(seed, static_cast<uint64_t>(l), 11, 0) % 2 == 0;
      spec.planes_only = spec.native && spec.frozen;
      const int count = experts ? draw(2, 3) : 1;
      layer.stacked = experts && seed % 2 == 0;
      for (int e = 0; e < count; ++e) {
        spec.name = layer.stacked ? fmt::format("layers.{}.mlp.experts.w[{}]", l, e)
                    : experts     ? fmt::format("layers.{}.mlp.experts.{}", l, e)
                                  : fmt::format("layers.{}.{}", l, draw(0, 1) == 0 ? "self_attention.qkv" : "mlp.fc1");
        layer.weights.push_back(static_cast<uint32_t>(model.weights.size()));
        model.weights.push_back(spec);
      }
    }
    layer.recompute = draw(0, 4) == 0;
    layer.gathers_backward = l > 0 || draw(0, 1) == 0;
    model.layers.push_back(layer);
  }
  model.options = {.scale = draw(0, 1) == 0 ? GradientScale::kMean : GradientScale::kSum,
                   .prefetch = draw(0, 7) == 0 ? PrefetchMode::kOff : PrefetchMode::kOn,
                   .distance = draw(0, 3),
                   .expert_distance = draw(0, 3),
                   .inline_bytes = draw(0, 3) == 0 && !model.maps ? 4096 : 0,
                   .check = !model.maps};
  if (draw(0, 3) == 0) model.options.cap_bytes = draw(0, 40000);
  if (draw(0, 1) == 0) model.options.graph_scope = {"attn"};
  if (draw(0, 2) == 0) model.options.graph_scope.insert("moe");
  model.captures = draw(0, 2) > 0;
  model.captures_live = draw(1, 3);
  return model;
}

std::string GeneratedModel::to_string() const {
  return fmt::format(
      "seed {}: {} ranks, {} steps of {} micro-batches{}{}{}{}{}{}, {} weights in {} layers, distance {}, {}", seed,
      ranks, steps, micro_batches, drain_each ? ", each drained" : "", evaluates ? ", evaluation" : "",
      skips ? ", skips" : "", async_compute ? ", asynchronous" : "", captures ? ", captures" : "", maps ? ", maps" : "",
      weights.size(), layers.size(), options.distance,
      options.cap_bytes ? fmt::format("cap {}", *options.cap_bytes) : "no cap");
}

bool GeneratedModel::skipped(int rank, int step, int micro_batch, size_t layer) const {
  if (!skips || layers[layer].weights.size() < 2) return false;
  return mixed(seed, static_cast<uint64_t>(rank), static_cast<uint64_t>(step * 8 + micro_batch), layer) % 3 == 0;
}

std::vector<GeneratedModel::Row> GeneratedModel::rows() const {
  constexpr size_t kMostLayers = 3;
  const std::vector<std::string> names(options.graph_scope.begin(), options.graph_scope.end());
  const GraphScope scope = GraphScope::of(names, options.moe_shared_expert_overlap);
  std::vector<Row> rows;
  for (size_t l = 0; l < layers.size(); ++l) {
    const bool captured = captures && chain_of(weights[layers[l].weights.front()].name, scope) == Chain::kGraphed;
    if (captured && !rows.empty() && rows.back().captured && rows.back().end - rows.back().begin < kMostLayers)
      ++rows.back().end;
    else
      rows.push_back({.begin = l, .end = l + 1, .captured = captured});
  }
  return rows;
}

size_t GeneratedModel::backward_ends(int rank, int step, int micro_batch) const {
  const uint64_t drawn = mixed(seed + 5, static_cast<uint64_t>(rank), static_cast<uint64_t>(step * 8 + micro_batch), 9);
  return skips && drawn % 4 == 0 ? drawn / 4 % layers.size() : 0;
}

TrainingResult room_for(const GeneratedModel& model) {
  TrainingResult result;
  const auto ranks = static_cast<size_t>(model.ranks);
  for (const WeightSpec& spec : model.weights) {
    result.weights.emplace_back(static_cast<size_t>(spec.rows * spec.columns));
    result.gradients.emplace_back(static_cast<size_t>(spec.rows * spec.columns));
  }
  result.outputs.resize(ranks);
  result.added.resize(ranks);
  result.replays.resize(ranks);
  result.mapped.resize(ranks);
  return result;
}

namespace {

std::string difference_of(const char* what, const std::vector<std::vector<float>>& expected,
                          const std::vector<std::vector<float>>& found) {
  for (size_t i = 0; i < expected.size(); ++i) {
    if (expected[i].size() != found[i].size())
      return fmt::format("{} {} has {} values, not {}", what, i, found[i].size(), expected[i].size());
    for (size_t j = 0; j < expected[i].size(); ++j)
      if (std::memcmp(&expected[i][j], &found[i][j], sizeof(float)) != 0)
        return fmt::format("{} {}: value {} is {}, not {}", what, i, j, found[i][j], expected[i][j]);
  }
  return {};
}

}  // namespace

std::string difference(const TrainingResult& expected, const TrainingResult& found) {
  for (const std::string& text : {difference_of("output of rank", expected.outputs, found.outputs),
                                  difference_of("gradient of weight", expected.gradients, found.gradients),
                                  difference_of("weight", expected.weights, found.weights)})
    if (!text.empty()) return text;
  return {};
}

}  // namespace tessera::etp
