// The sharded program.
#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include "base/fail.h"
#include "collective/bootstrap.h"
#include "collective/group.h"
#include "device/record/check.h"
#include "device/record/sinks.h"
#include "device/stream.h"
#include "device/virtual/virtual_world.h"
#include "etp/testing/generated_math.h"
#include "etp/testing/generated_testing.h"

namespace tessera::etp {
namespace {

using namespace generated;

// One rank's training. What it computes are operations of a stream, which may run later: nothing here looks at values.
class RankTrainer {
 public:
  RankTrainer(const GeneratedModel& model, ShardGroup group, TrainingResult& result)
      : model_(model), rank_(group.rank()), result_(result), rows_(model.rows()) {
    captured_.output.resize(model.layers.size() + 1);
    RuntimeOptions options = model.options;
    device::Device& device = group.impl()->device();
    options.compute = model.async_compute ? device.make_stream({.name = "compute"}) : device.caller();
    compute_ = options.compute;
    runtime_.emplace(std::move(group), options);
  }

  void run() {
    add_weights();
    for (int step = 0; step < model_.steps; ++step) {
      runtime_->zero_gradients();
      for (int mb = 0; mb < model_.micro_batches; ++mb) {
        pass(step, mb);
        if (model_.drain_each) drain();
      }
      drain();
      if (model_.evaluates) evaluate();
      if (step + 1 == model_.steps) keep_gradients();
      runtime_->update(ids_, [this] { optimise(); });
      if ((step + 1) % model_.captures_live == 0) {
        forwards_.clear();
        backwards_.clear();
      }
    }
    compute_->synchronize(Deadline::after(seconds(60)));
    keep_weights();
    const RuntimeReport report = runtime_->report();
    result_.replays[static_cast<size_t>(rank_)] = report.replays;
    result_.mapped[static_cast<size_t>(rank_)] = report.mapped;
  }

 private:
  void add_weights() {
    std::map<uint32_t, int> stacks;  // how many weights, by the first one
    for (const GeneratedModel::Layer& layer : model_.layers)
      if (layer.stacked) stacks[layer.weights.front()] = static_cast<int>(layer.weights.size());
    while (ids_.size() < model_.weights.size()) {
      WeightSpec spec = model_.weights[ids_.size()];
      const auto stack = stacks.find(static_cast<uint32_t>(ids_.size()));
      if (stack == stacks.end()) {
        ids_.push_back(runtime_->add(spec));
        continue;
      }
      spec.name.resize(spec.name.find('['));
      for (const WeightId expert : runtime_->add_stack(spec, stack->second)) ids_.push_back(expert);
    }
    for (const GeneratedModel::Layer& layer : model_.layers)
      if (layer.weights.size() > 1 && !layer.stacked && known_lists_.insert(layer.weights.front()).second)
        runtime_->add_experts(layer.weights);
    for (const WeightId w : ids_) {
      const RowRange rows = runtime_->rows(w);
      if (rows.end > model_.weights[w].rows)
        fail_internal("rows [{}, {}) of weight {}, which has {}", rows.begin, rows.end, w, model_.weights[w].rows);
      const int64_t columns = model_.weights[w].columns;
      if (model_.weights[w].native) {
        std::vector<float>& master = masters_[w];
        master.resize(static_cast<size_t>(rows.size() * columns));
        runtime_->set_master(w, master.data(), DType::kF32);
      }
      float* to = own_rows(w);
      for (int64_t i = rows.begin * columns; i < rows.end * columns; ++i) *to++ = initial_value(w, i);
      if (!model_.weights[w].frozen) runtime_->gradient(w);
    }
    runtime_->start();
  }

  // This rank's, which it writes.
  float* own_rows(WeightId w) {
    return model_.weights[w].native ? masters_[w].data() : reinterpret_cast<float*>(runtime_->shard(w));
  }

  // A weight where it was gathered, for as long as its memory is held.
  struct Gathered {
    std::shared_ptr<FullWeight> memory;
    const std::byte* data = nullptr;
    DType dtype = DType::kF32;
    size_t elements = 0;
    int64_t bytes() const { return bytes_of(dtype, static_cast<int64_t>(elements)); }
  };

  std::vector<Gathered> acquire(const GeneratedModel::Layer& layer, Phase phase, const Use& use) {
    std::vector<FullWeight> full;
    if (layer.weights.size() == 1)
      full.push_back(runtime_->acquire(layer.weights.front(), phase, use));
    else
      full = runtime_->acquire(layer.weights, phase, use);
    std::vector<Gathered> gathered;
    const size_t parts = layer.weights.size() / full.size();  // of one buffer: those of a stack
    for (FullWeight& each : full) {
      const auto memory = std::make_shared<FullWeight>(std::move(each));
      const auto elements = static_cast<size_t>(memory->rows() * memory->columns()) / parts;
      const auto* data = static_cast<const std::byte*>(memory->data());
      for (size_t i = 0; i < parts; ++i) {
        gathered.push_back({.memory = memory, .data = data, .dtype = memory->dtype(), .elements = elements});
        data += gathered.back().bytes();
      }
    }
    return gathered;
  }

  void compute(const char* name, std::vector<device::Access> accesses, std::function<void()> body) {
    compute_->enqueue({.name = name, .subject = "model", .accesses = std::move(accesses), .body = std::move(body)});
  }

  static device::Access whole(const Gathered& full) {
    return device::read_of(full.data, static_cast<size_t>(full.bytes()));
  }

  struct Values {
    std::vector<float> output;
    float above = 1;
  };

  void pass(int step, int mb) {
    values_.push_back(std::make_unique<Values>());
    Values& v = *values_.back();
    v.output.assign(model_.layers.size() + 1, 0);
    v.output[0] = input_of(rank_, step, mb);
    const auto skipped = [&](size_t l) { return model_.skipped(rank_, step, mb, l); };
    for (const GeneratedModel::Row& row : rows_) {
      if (is_replayed(row, step, mb)) {
        replay(forwards_[row.begin], v, mb, [&] {
          for (size_t l = row.begin; l < row.end; ++l) forward_of(l, captured_, 0, false);
        });
        continue;
      }
      for (size_t l = row.begin; l < row.end; ++l) forward_of(l, v, mb, skipped(l));
    }
    const size_t ends = model_.backward_ends(rank_, step, mb);
    for (auto row = rows_.rbegin(); row != rows_.rend(); ++row) {
      if (row->begin >= ends && is_replayed(*row, step, mb)) {
        replay(backwards_[row->begin], v, mb, [&] {
          for (size_t l = row->end; l-- > row->begin;) backward_of(l, captured_, {});
        });
      } else {
        for (size_t l = row->end; l-- > std::max(row->begin, ends);)
          if (!skipped(l)) backward_of(l, v, {.micro_batch = mb, .version = version_in(l, step)});
      }
      check_added();
    }
    compute("keep", {}, [this, &v] {
      std::vector<float>& outputs = result_.outputs[static_cast<size_t>(rank_)];
      outputs.push_back(v.output.back());
      outputs.push_back(v.above);
    });
  }

  int64_t version_in(size_t l, int step) const {
    const bool never_written = model_.weights[model_.layers[l].weights.front()].planes_only;
    return never_written ? 1 : step + 1;
  }

  bool is_replayed(const GeneratedModel::Row& row, int step, int mb) const {
    for (size_t l = row.begin; l < row.end; ++l)
      if (model_.skipped(rank_, step, mb, l)) return false;
    return row.captured;
  }

  // What is captured computes on `captured_`.
  void replay(CapturedStep& captured, Values& v, int mb, const std::function<void()>& part) {
    if (!captured) captured = runtime_->capture(part);
    compute("enter", {}, [this, &v] { captured_ = v; });
    captured.replay(mb);
    compute("leave", {}, [this, &v] { v = captured_; });
  }

  void forward_of(size_t l, Values& v, int mb, bool skipped) {
    compute("copy", {}, [&v, l] { v.output[l + 1] = v.output[l]; });
    if (skipped) return;
    for (const Gathered& full : acquire(model_.layers[l], Phase::kForward, {.micro_batch = mb}))
      compute("forward", {whole(full)}, forward_on(full, v.output[l + 1]));
  }

  void evaluate() {
    values_.push_back(std::make_unique<Values>());
    Values& v = *values_.back();
    for (const GeneratedModel::Layer& layer : model_.layers)
      for (const Gathered& full : acquire(layer, Phase::kForward, {.expects_backward = false}))
        compute("forward", {whole(full)}, forward_on(full, v.above));
    compute("keep", {}, [this, &v] { result_.outputs[static_cast<size_t>(rank_)].push_back(v.above); });
  }

  static std::function<void()> forward_on(const Gathered& full, float& value) {
    return [data = full.data, dtype = full.dtype, n = full.elements, &value] {
      value = forward(to_floats(data, dtype, n), value);
    };
  }

  void backward_of(size_t l, Values& v, const Use& use) {
    const GeneratedModel::Layer& layer = model_.layers[l];
    std::vector<Gathered> again;
    std::vector<Gathered> full;
    if (layer.recompute) again = acquire(layer, Phase::kRecompute, use);
    if (layer.gathers_backward) full = acquire(layer, Phase::kBackward, use);
    std::vector<GradientBuffer> gradients;
    for (size_t e = 0; e < layer.weights.size(); ++e) {
      const WeightId w = layer.weights[e];
      if (layer.recompute) compute("recompute", {whole(again[e])}, forward_on(again[e], v.output[l + 1]));
      if (layer.gathers_backward) {
        compute("dgrad", {whole(full[e])}, [data = full[e].data, dtype = full[e].dtype, n = full[e].elements, &v] {
          v.above = backward(to_floats(data, dtype, n), v.above);
        });
      }
      if (model_.weights[w].frozen) continue;
      gradients.push_back(runtime_->gradient_buffer(w, use.micro_batch));
      const GradientBuffer& g = gradients.back();
      const auto n = static_cast<size_t>(g.rows() * g.columns());
      compute("wgrad", {device::write_of(g.data(), static_cast<size_t>(bytes_of(g.dtype(), static_cast<int64_t>(n))))},
              [to = g.data(), dtype = g.dtype(), n, &v, l, rank = rank_] {
                const Floats values = gradient_of(n, v.output[l + 1], v.above, rank);
                cast_row(DType::kF32, dtype)(values.data(), to, n);
              });
    }
    full.clear();
    runtime_->produce(gradients);
  }

  void check_added() {
    // A hook looks at the ranks that a finished round had.
    for (const Added& added : runtime_->added())
      if (!runtime_->rows(added.weight).empty() && added.ranks < 1)
        fail_internal("round {} of weight {} is reported and not folded", added.round, added.weight);
  }

  void drain() { result_.added[static_cast<size_t>(rank_)].push_back(runtime_->drain()); }

  void optimise() {
    for (const WeightId w : ids_) {
      if (model_.weights[w].frozen || runtime_->rows(w).empty()) continue;
      const int64_t n = runtime_->rows(w).size() * model_.weights[w].columns;
      float* rows = own_rows(w);
      const Floats gradient =
          to_floats(runtime_->gradient(w), model_.weights[w].accumulated.value_or(DType::kF32), static_cast<size_t>(n));
      for (int64_t i = 0; i < n; ++i) rows[i] = stepped(rows[i], gradient[static_cast<size_t>(i)]);
    }
  }

  void keep_weights() {
    for (const WeightId w : ids_) {
      const RowRange rows = runtime_->rows(w);
      if (rows.empty()) continue;
      const int64_t columns = model_.weights[w].columns;
      std::memcpy(result_.weights[w].data() + rows.begin * columns, own_rows(w),
                  static_cast<size_t>(rows.size() * columns) * sizeof(float));
    }
  }

  void keep_gradients() {
    for (const WeightId w : ids_) {
      const RowRange rows = runtime_->rows(w);
      if (rows.empty() || model_.weights[w].frozen) continue;
      const int64_t columns = model_.weights[w].columns;
      const Floats values = to_floats(runtime_->gradient(w), model_.weights[w].accumulated.value_or(DType::kF32),
                                      static_cast<size_t>(rows.size() * columns));
      std::ranges::copy(values, result_.gradients[w].begin() + rows.begin * columns);
    }
  }

  const GeneratedModel& model_;
  const int rank_;
  TrainingResult& result_;
  const std::vector<GeneratedModel::Row> rows_;
  std::vector<std::unique_ptr<Values>> values_;  // until the stream has ended
  Values captured_;                              // likewise
  std::shared_ptr<device::Stream> compute_;
  std::optional<Runtime> runtime_;
  std::vector<WeightId> ids_;
  std::map<WeightId, std::vector<float>> masters_;  // of native weights
  std::set<uint32_t> known_lists_;
  std::map<size_t, CapturedStep> forwards_;  // by their first layer
  std::map<size_t, CapturedStep> backwards_;
};

}  // namespace

void train_rank(const GeneratedModel& model, ShardGroup group, TrainingResult& result) {
  RankTrainer(model, std::move(group), result).run();
}

namespace {

device::Order order_of(uint64_t schedule) {
  if (schedule == 0) return device::Order::kLatestFirst;
  return schedule == 1 ? device::Order::kEarliestFirst : device::Order::kRandom;
}

std::string train_in(device::VirtualWorld& world, const GeneratedModel& model, TrainingResult& result) {
  collective::InProcessExchange exchange(model.ranks);
  try {
    world.run(model.ranks, [&](int rank) {
      device::Device& device = world.device(rank);
      ShardGroup group(collective::Group::form(exchange.of_rank(rank, device, seconds(60)), {.rank = rank,
                                                                                             .size = model.ranks,
                                                                                             .name = "generated",
                                                                                             .device = &device,
                                                                                             .slots = 64,
                                                                                             .in_process = true}));
      train_rank(model, group, result);
      group.close();
    });
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

}  // namespace

std::string train_in_schedule(const GeneratedModel& model, uint64_t schedule, TrainingResult& result) {
  device::VirtualWorld world(schedule, order_of(schedule));
  return train_in(world, model, result);
}

CheckedRun train_checked(const GeneratedModel& model, uint64_t schedule, TrainingResult& result) {
  std::vector<device::RankLog> logs;
  for (int rank = 0; rank < model.ranks; ++rank)
    logs.emplace_back(device::LogHead{.run = 1, .rank = rank, .ranks = model.ranks});
  device::VirtualWorld world(schedule, order_of(schedule));
  for (int rank = 0; rank < model.ranks; ++rank)
    world.device(rank).recorder().start(device::sink_to(logs[static_cast<size_t>(rank)]));
  CheckedRun run;
  run.error = train_in(world, model, result);
  for (int rank = 0; rank < model.ranks; ++rank) world.device(rank).recorder().stop();
  run.report = device::check_schedule(logs);
  return run;
}

std::string CheckedRun::finding() const {
  if (!error.empty()) return error;
  if (!report.conflicts.empty()) return report.conflicts.front().to_string();
  if (!report.faults.empty()) return report.faults.front();
  return report.unfinished.empty() ? std::string() : report.unfinished.front();
}

}  // namespace tessera::etp
