// The cost of observing transfers: counters served over HTTP and a trace written, compared with neither. Two ranks in
// one process, so that both sides are traced; small transfers, where every fixed cost shows.
#include <benchmark/benchmark.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/metrics_server.h"
#include "base/trace.h"
#include "tessera/bus.h"
#include "tessera/memory.h"
#include "tessera/store.h"

namespace tessera {
namespace {

class Ranks {
 public:
  static Ranks& get() {
    static Ranks ranks;
    return ranks;
  }

  // The other thread takes it, too.
  void transfer() { sender_->send().wait(); }
  const std::string& folder() const { return folder_; }

 private:
  static constexpr Index kElements = 1024;

  Ranks() {
    const std::string url = store_->address();
    receiving_ = std::thread([this, url] {
      Bus bus({.job = "inference", .store = url, .threads = 1});
      Pair pair = bus.pair({.name = "weights", .peer = "trainer"});
      Batch batch = pair.accept("policy", {{spec(received_)}});
      try {
        while (true) batch.recv().wait();
      } catch (const Error&) {
        // The sender has closed the batch.
      }
    });
    bus_.emplace(BusOptions{.job = "trainer", .store = url, .threads = 1});
    pair_.emplace(bus_->pair({.name = "weights", .peer = "inference"}));
    sender_.emplace(pair_->offer("policy", {{spec(sent_)}}));
  }
  ~Ranks() {
    sender_.reset();
    receiving_.join();
    pair_.reset();
    bus_.reset();
    store_.reset();
    std::filesystem::remove_all(folder_);
  }

  static std::string make_folder() {
    std::string folder = (std::filesystem::temp_directory_path() / "tessera-seen-XXXXXX").string();
    if (::mkdtemp(folder.data()) == nullptr) throw Error(ErrorCode::kInternal, "no temporary folder");
    ::setenv("TESSERA_RUNTIME_DIR", folder.c_str(), 1);
    return folder;
  }
  static TensorSpec spec(const SharedBuffer& memory) {
    return {.name = "t", .data = memory.data(), .dtype = DType::kF32, .shape = {kElements}};
  }

  const std::string folder_ = make_folder();
  std::unique_ptr<StoreServer> store_ = serve_store("unix://" + folder_ + "/store");
  const SharedBuffer sent_ = SharedHeap::process().allocate(kElements * sizeof(float));
  const SharedBuffer received_ = SharedHeap::process().allocate(kElements * sizeof(float));
  std::thread receiving_;
  std::optional<Bus> bus_;
  std::optional<Pair> pair_;
  std::optional<Batch> sender_;
};

// Wall time and CPU time of a block of transfers, in seconds.
struct Cost {
  double real;
  double cpu;
};

double seconds_of(clockid_t clock) {
  timespec time{};
  ::clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

Cost block() {
  constexpr int kTransfers = 250;
  const Cost before{.real = seconds_of(CLOCK_MONOTONIC), .cpu = seconds_of(CLOCK_PROCESS_CPUTIME_ID)};
  for (int n = 0; n < kTransfers; ++n) Ranks::get().transfer();
  return {.real = seconds_of(CLOCK_MONOTONIC) - before.real, .cpu = seconds_of(CLOCK_PROCESS_CPUTIME_ID) - before.cpu};
}

double quantile(std::vector<double> of, double where) {
  const auto nth = of.begin() + static_cast<std::ptrdiff_t>(where * static_cast<double>(of.size() - 1));
  std::nth_element(of.begin(), nth, of.end());
  return *nth;
}

// A shared machine changes its speed from second to second by more than what is measured here. So three blocks of a
// fraction of a second follow one another, in rotating order: one observed and two not. The ratios are to the mean of
// those two; `control`, the ratio between the two, should be 1 and tells how far to trust the others.
void seen_over_unseen(benchmark::State& state) {
  const std::string trace = Ranks::get().folder() + "/trace.json";
  const auto seen = [&] {
    const MetricsServer metrics(parse_metrics_address("0"));
    const auto tracing = Trace::start(trace);
    return block();
  };
  block();  // warm
  std::vector<double> real, cpu, control, cpu_control;
  size_t turn = 0;
  for ([[maybe_unused]] const auto _ : state) {
    std::array<Cost, 3> costs{};
    for (size_t n = 0; n < costs.size(); ++n) {
      const size_t which = (n + turn) % costs.size();
      costs.at(which) = which == 0 ? seen() : block();
    }
    ++turn;
    real.push_back(2 * costs[0].real / (costs[1].real + costs[2].real));
    cpu.push_back(2 * costs[0].cpu / (costs[1].cpu + costs[2].cpu));
    control.push_back(costs[1].real / costs[2].real);
    cpu_control.push_back(costs[1].cpu / costs[2].cpu);
  }
  std::filesystem::remove(trace);
  state.counters["real"] = quantile(real, 0.5);
  state.counters["cpu"] = quantile(cpu, 0.5);
  state.counters["control"] = quantile(control, 0.5);
  state.counters["cpu_control"] = quantile(cpu_control, 0.5);
}
BENCHMARK(seen_over_unseen)->Iterations(150)->UseRealTime();

}  // namespace
}  // namespace tessera

BENCHMARK_MAIN();
