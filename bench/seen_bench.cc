// What transfers cost when they are seen: counters served over HTTP and a trace written, against neither. Two ranks in
// one process, so that both sides are traced; small transfers, where every fixed cost shows.
#include <benchmark/benchmark.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>

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

  // Taken by the other thread, too.
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

void transfer_unseen(benchmark::State& state) {
  Ranks& ranks = Ranks::get();
  for ([[maybe_unused]] const auto _ : state) ranks.transfer();
}
BENCHMARK(transfer_unseen)->Iterations(2000)->MeasureProcessCPUTime()->UseRealTime();

void transfer_seen(benchmark::State& state) {
  Ranks& ranks = Ranks::get();
  const std::string trace = ranks.folder() + "/trace.json";
  {
    const auto metrics = std::make_unique<MetricsServer>(parse_metrics_address("0"));
    const auto tracing = Trace::start(trace);
    for ([[maybe_unused]] const auto _ : state) ranks.transfer();
  }
  std::filesystem::remove(trace);
}
BENCHMARK(transfer_seen)->Iterations(2000)->MeasureProcessCPUTime()->UseRealTime();

}  // namespace
}  // namespace tessera

BENCHMARK_MAIN();
