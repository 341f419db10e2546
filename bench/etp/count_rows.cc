// Counts: bytes that gathers and folds read, bytes that a rank holds; and how fast recorded schedules are checked.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/fail.h"
#include "bench/etp/rows.h"
#include "bench/etp/training_logs.h"
#include "collective/group.h"
#include "device/device.h"
#include "device/record/check.h"
#include "device/record/sinks.h"

namespace tessera::bench {
namespace {

using etp::Phase;
using etp::PrefetchMode;
using etp::Runtime;
using etp::RuntimeReport;
using etp::WeightId;

constexpr int64_t kWireRows = 4096;
constexpr int64_t kWireColumns = 1024;

// Bytes that the operations called `name` have read, by the record of what they did.
double bytes_read(const device::RankLog& log, std::string_view name) {
  size_t bytes = 0;
  for (const device::Record& record : log.records())
    if (record.kind == device::RecordKind::kOperation && record.name == name)
      for (const device::RecordedAccess& access : record.accesses)
        if (!access.write) bytes += access.bytes;
  return static_cast<double>(bytes);
}

// Gathers for a forward and a backward, and a gradient.
void use_and_produce(const Rank& rank, const std::string& format, Figures& figures) {
  Runtime runtime(rank.shards(), {.prefetch = PrefetchMode::kOff});
  const WeightId weight = runtime.add(
      {.name = "weight", .rows = kWireRows, .columns = kWireColumns, .dtype = DType::kBF16, .format = format});
  runtime.start();
  device::RankLog log({.run = 1, .rank = rank.number(), .ranks = rank.size()});
  device::Recorder& recorder = rank.group().device().recorder();
  recorder.start(device::sink_to(log));
  runtime.acquire(weight, Phase::kForward);
  runtime.acquire(weight, Phase::kBackward);
  etp::GradientBuffer gradient = runtime.gradient_buffer(weight);
  std::memset(gradient.data(), 0, static_cast<size_t>(bytes_of(gradient.dtype(), kWireRows * kWireColumns)));
  runtime.produce(std::move(gradient));
  runtime.drain();
  recorder.stop();
  constexpr double kElements = kWireRows * kWireColumns;
  figures["gathers"].push_back(bytes_read(log, "gather") / kElements);
  figures["gradient"].push_back(bytes_read(log, "produce") / kElements);
}

// A model with layers of two shapes, one of them quantised, and experts; and what it holds while it is trained.
class Model {
 public:
  Model(const Rank& rank, const etp::RuntimeOptions& options)
      : device_(rank.group().device()), runtime_(rank.shards(), options) {
    for (int i = 0; i < kPairs; ++i) {
      add(fmt::format("layers.{}.up", i), 512, 2048, "");
      add(fmt::format("layers.{}.down", i), 2048, 512, "mxfp8");
    }
    for (int i = 0; i < 8; ++i) experts_.push_back(add(fmt::format("experts.{}", i), 256, 256, "bf16"));
    runtime_.add_experts(experts_);
    runtime_.start();
  }

  Runtime& runtime() { return runtime_; }
  // Of this rank's buffers, since it was last asked for.
  size_t take_most_bytes() { return std::exchange(most_bytes_, 0); }
  int64_t most_held() const { return most_held_; }  // gathered weights, used or on their way

  void step() {
    for (const WeightId layer : layers_) use(layer, Phase::kForward);
    use_experts(Phase::kForward);
    use_experts(Phase::kBackward);
    for (auto layer = layers_.rbegin(); layer != layers_.rend(); ++layer) {
      use(*layer, Phase::kBackward);
      runtime_.produce(runtime_.gradient_buffer(*layer));
      note();
    }
    runtime_.update(all_, [] {});
    note();
  }

 private:
  static constexpr int kPairs = 6;

  WeightId add(const std::string& name, int64_t rows, int64_t columns, const std::string& format) {
    const WeightId weight = runtime_.add({.name = name, .rows = rows, .columns = columns, .format = format});
    all_.push_back(weight);
    if (!name.starts_with("experts")) layers_.push_back(weight);
    return weight;
  }
  void use(WeightId weight, Phase phase) {
    const etp::FullWeight full = runtime_.acquire(weight, phase);
    note();
  }
  void use_experts(Phase phase) {
    const std::vector<etp::FullWeight> full = runtime_.acquire(experts_, phase);
    note();
    if (phase == Phase::kForward) return;
    std::vector<etp::GradientBuffer> gradients;
    for (const WeightId expert : experts_) gradients.push_back(runtime_.gradient_buffer(expert));
    runtime_.produce(gradients);
    note();
  }
  void note() {
    most_bytes_ = std::max(most_bytes_, device_.allocated());
    const RuntimeReport report = runtime_.report();
    int64_t held = 0;
    for (const RuntimeReport::Weight& weight : report.weights) held += weight.gathered_bytes;
    most_held_ = std::max(most_held_, held);
  }

  device::Device& device_;
  Runtime runtime_;
  std::vector<WeightId> all_, layers_, experts_;
  size_t most_bytes_ = 0;
  int64_t most_held_ = 0;
};

void train(const Rank& rank, std::optional<int64_t> cap, Figures& figures) {
  Model model(rank, {.prefetch = PrefetchMode::kOn, .distance = 2, .cap_bytes = cap});
  const auto forecast = static_cast<double>(model.runtime().forecast().total());
  for (int i = 0; i < 2; ++i) model.step();
  figures["first"].push_back(static_cast<double>(model.take_most_bytes()) / forecast);
  for (int i = 0; i < 5; ++i) model.step();
  const RuntimeReport report = model.runtime().report();
  figures["later"].push_back(static_cast<double>(model.take_most_bytes()) / forecast);
  figures["held"].push_back(static_cast<double>(model.most_held()));
  figures["buffers"].push_back(static_cast<double>(report.gathered_peak_bytes));
  figures["refused"].push_back(static_cast<double>(report.refused));
  rank.together();
}

}  // namespace

void count_rows(Table& table) {
  Table::section("bytes, counted: of a weight [4096, 1024] on each of 2 ranks; of a model of 12 layers and 8 experts");
  struct Wire {
    const char* format;
    double bytes;
  };
  for (const Wire& wire : {Wire{"bf16", 6.0}, Wire{"mxfp8", 4.0625}, Wire{"nvfp4", 3.125}}) {
    const auto ranks =
        run_ranks(2, [&](const Rank& rank, Figures& figures) { use_and_produce(rank, wire.format, figures); });
    const double bytes = ranks[0].at("gathers")[0] + ranks[0].at("gradient")[0];
    table.add({.what = fmt::format("{}: two gathers and a bf16 gradient, a weight", wire.format),
               .figure = "bytes",
               .wall = bytes,
               .target = wire.bytes * 1.01,
               .at_most = true});
  }
  const auto free = run_ranks(2, [](const Rank& rank, Figures& figures) { train(rank, {}, figures); });
  const double later = std::max(free[0].at("later")[0], free[1].at("later")[0]);
  table.add({.what = fmt::format("peak of later steps: {:.4f} of the forecast", later),
             .figure = "% from it",
             .wall = std::abs(later - 1) * 100,
             .target = 5,
             .at_most = true});
  table.add({.what = "peak of the first two steps",
             .figure = "of the forecast",
             .wall = std::max(free[0].at("first")[0], free[1].at("first")[0]),
             .target = 1.05,
             .at_most = true});
  constexpr int64_t kCap = 9 << 20;
  const auto capped = run_ranks(2, [&](const Rank& rank, Figures& figures) { train(rank, kCap, figures); });
  table.add({.what = fmt::format("gathered at most, {:.0f} prefetches refused", capped[0].at("refused")[0]),
             .figure = "of the cap",
             .wall = capped[0].at("held")[0] / kCap,
             .target = 1,
             .at_most = true});
  table.add({.what = "buffers for that, those kept for later included",
             .figure = "of the cap",
             .wall = capped[0].at("buffers")[0] / kCap,
             .target = 1,
             .at_most = true});
}

void checker_rows(Table& table) {
  Table::section("the check of recorded schedules");
  const auto ranks = run_ranks(1, [](const Rank& rank, Figures& figures) {
    device::TrainingLogs training;
    const std::vector<device::RankLog>& logs = training.with(1'000'000);
    const std::array<Work, 1> works{Work{"check", [&] {
                                           const device::CheckReport report = device::check_schedule(logs);
                                           TESSERA_CHECK(report.ok() && report.unreached == 0);
                                           figures["records"] = {static_cast<double>(report.records)};
                                         }}};
    take_turns(rank, figures, 3, works);
  });
  const Cost cost = median(costs_of(ranks, "check"));
  table.add({.what = fmt::format("{:.0f} records of 4 ranks", ranks[0].at("records")[0]),
             .time = cost,
             .figure = "s",
             .wall = cost.wall,
             .cpu = cost.cpu,
             .target = 5,
             .at_most = true});
}

}  // namespace tessera::bench
