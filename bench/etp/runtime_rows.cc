// What the runtime adds to a use, and what it hides.
#include <fmt/format.h>

#include <array>
#include <memory>
#include <thread>

#include "base/fail.h"
#include "bench/etp/rows.h"
#include "collective/group.h"
#include "device/device.h"

namespace tessera::bench {
namespace {

using etp::Phase;
using etp::PrefetchMode;
using etp::Runtime;
using etp::RuntimeOptions;
using etp::WeightId;

// --- overlap

constexpr int kLayers = 16;
constexpr int64_t kLayerRows = 512;
constexpr int64_t kLayerBytes = kLayerRows * kLayerRows * 4;
constexpr Duration kUse = std::chrono::milliseconds(20);  // one layer's computation, and one layer's bytes on their way
constexpr int kWarmSteps = 2;
constexpr int kSteps = 5;

// A step of training whose computations are those of a device beside this CPU: the host waits while they take place.
class PacedSteps {
 public:
  PacedSteps(const Rank& rank, PrefetchMode prefetch)
      : rate_(static_cast<double>(kLayerBytes) / to_seconds(kUse)), runtime_(rank.shards(), options(prefetch)) {
    for (int i = 0; i < kLayers; ++i)
      layers_.push_back(runtime_.add({.name = fmt::format("layers.{}", i), .rows = kLayerRows, .columns = kLayerRows}));
    runtime_.start();
  }

  void step(Figures* figures) {
    const etp::RuntimeReport before = runtime_.report();
    computed_ = 0;
    const Stopwatch watch;
    for (const WeightId layer : layers_) {
      const etp::FullWeight full = runtime_.acquire(layer, Phase::kForward);
      compute();
    }
    for (auto layer = layers_.rbegin(); layer != layers_.rend(); ++layer) {
      etp::GradientBuffer gradient = runtime_.gradient_buffer(*layer);
      {
        const etp::FullWeight full = runtime_.acquire(*layer, Phase::kBackward);
        compute();
      }
      runtime_.produce(std::move(gradient));
    }
    runtime_.update(layers_, [] {});
    const Cost cost = watch.elapsed();
    if (figures == nullptr) return;
    const etp::RuntimeReport after = runtime_.report();
    const double gathering = static_cast<double>(after.bytes_gathered - before.bytes_gathered) / rate_;
    (*figures)["step, wall"].push_back(cost.wall);
    (*figures)["step, CPU"].push_back(cost.cpu);
    (*figures)["exposed"].push_back(after.exposed_seconds - before.exposed_seconds);
    (*figures)["least"].push_back(std::max(computed_, gathering));
  }

 private:
  RuntimeOptions options(PrefetchMode prefetch) const {
    return {.prefetch = prefetch, .gather_bytes_per_second = rate_, .reduce_bytes_per_second = rate_};
  }
  void compute() {
    const TimePoint began = Clock::steady().now();
    std::this_thread::sleep_until(began + kUse);
    computed_ += to_seconds(Clock::steady().now() - began);
  }

  const double rate_;
  Runtime runtime_;
  std::vector<WeightId> layers_;
  double computed_ = 0;
};

std::vector<Figures> paced_steps(PrefetchMode prefetch) {
  return run_ranks(2, [prefetch](const Rank& rank, Figures& figures) {
    PacedSteps steps(rank, prefetch);
    for (int i = 0; i < kWarmSteps + kSteps; ++i) {
      rank.together();
      steps.step(i < kWarmSteps ? nullptr : &figures);
    }
    rank.together();
  });
}

// --- consumption

constexpr int kWeights = 16;
constexpr int kRounds = 100;
constexpr double kUses = kWeights * kRounds;

struct Counted {
  size_t records = 0;
  std::unique_ptr<device::RecordBlock> operator()(std::unique_ptr<device::RecordBlock> block) {
    records += block->size();
    return block;
  }
};

// Uses of weights with next to no data, with the recorder off and on.
void use_small(const Rank& rank, const RuntimeOptions& options, Figures& figures) {
  Runtime runtime(rank.shards(), options);
  for (int i = 0; i < kWeights; ++i)
    runtime.add({.name = fmt::format("layers.{}", i), .rows = 32, .columns = 4, .frozen = true});
  runtime.start();
  rank.together();
  device::Recorder& recorder = rank.group().device().recorder();
  Counted counted;
  const auto uses = [&] {
    for (int i = 0; i < kRounds; ++i)
      for (WeightId w = 0; w < kWeights; ++w) runtime.acquire(w, Phase::kForward, {.expects_backward = false});
  };
  const std::array<Work, 2> works{Work{"off",
                                       [&] {
                                         const double began = thread_cpu_seconds();
                                         uses();
                                         figures["caller"].push_back(thread_cpu_seconds() - began);
                                       }},
                                  Work{"on", [&] {
                                         recorder.start(std::ref(counted));
                                         uses();
                                         recorder.stop();
                                       }}};
  constexpr int kBlocks = 41;
  take_turns(rank, figures, kBlocks, works);
  rank.together();
  figures["records"].push_back(static_cast<double>(counted.records) / (kUses * (kBlocks + 1)));
}

// Seconds of CPU that a call of a recorder takes that is off.
double off_call_seconds() {
  device::Recorder recorder;
  constexpr int kCalls = 10'000'000;
  std::vector<Cost> costs;
  for (int turn = 0; turn < 5; ++turn) {
    const Stopwatch watch;
    for (uint64_t i = 0; i < kCalls; ++i) recorder.event_wait(0, i);
    costs.push_back(watch.elapsed());
  }
  return median(costs).cpu / kCalls;
}

void add_use_rows(Table& table, const std::string& name, const RuntimeOptions& options, bool has_target) {
  const auto ranks = run_ranks(2, [&](const Rank& rank, Figures& figures) { use_small(rank, options, figures); });
  const std::vector<Cost> off = costs_of(ranks, "off");
  const std::vector<Cost> on = costs_of(ranks, "on");
  const Cost use = median(off);
  const auto target = [&](double value) { return has_target ? std::optional(value) : std::nullopt; };
  table.add({.what = name,
             .figure = "us",
             .wall = use.wall / kUses * 1e6,
             .cpu = use.cpu / kUses * 1e6,
             .target = target(3),
             .at_most = true});
  table.add({.what = "  of that on the calling thread",
             .figure = "us of CPU",
             .wall = median(ranks.front().at("caller")) / kUses * 1e6,
             .target = 3,
             .at_most = true});
  const double records = ranks.front().at("records").front();
  // A call that records and a branch that asks whether to: two branches a record.
  const double branches = 2 * records * off_call_seconds();
  table.add({.what = fmt::format("  recorder off: {:.1f} records a use", records),
             .figure = "% of the use",
             .wall = branches / (use.cpu / kUses) * 100,
             .target = target(2),
             .at_most = true});
  const Cost ratio = median_ratio(on, off);
  table.add({.what = "  recorder on",
             .figure = "% more",
             .wall = (ratio.wall - 1) * 100,
             .cpu = (ratio.cpu - 1) * 100,
             .target = target(25),
             .at_most = true});
}

}  // namespace

void overlap_rows(Table& table) {
  Table::section("16 layers of 1 MiB, gathers, folds and computation at the same pace, 20 ms each; 2 ranks");
  const auto with = paced_steps(PrefetchMode::kOn);
  const auto without = paced_steps(PrefetchMode::kOff);
  table.add(
      {.what = "exposed a step, without prefetch", .figure = "ms", .wall = median(without[0].at("exposed")) * 1e3});
  table.add({.what = "exposed a step, with prefetch",
             .figure = "of that",
             .wall = median(with[0].at("exposed")) / median(without[0].at("exposed")),
             .target = 1.0 / 3,
             .at_most = true});
  table.add({.what = "step with prefetch",
             .time = median(costs_of(with, "step")),
             .figure = "of max(c., m.)",
             .wall = median(with[0].at("step, wall")) / median(with[0].at("least")),
             .target = 1.1,
             .at_most = true});
  table.add({.what = "step without prefetch",
             .time = median(costs_of(without, "step")),
             .figure = "of max(c., m.)",
             .wall = median(without[0].at("step, wall")) / median(without[0].at("least"))});
}

void consumption_rows(Table& table) {
  Table::section("a use of a weight of 512 bytes: acquire, predict, release; 2 ranks");
  add_use_rows(table, "gathered on demand", {.prefetch = PrefetchMode::kOff}, true);
  add_use_rows(table, "prefetched", {.prefetch = PrefetchMode::kOn}, true);
  add_use_rows(table, "prefetched, always on a stream", {.prefetch = PrefetchMode::kOn, .inline_bytes = 0}, false);
}

}  // namespace tessera::bench
