// Schedule logs: to check, write and read a million records: bin/record_bench [--benchmark_filter=...]
//
// Four ranks with three streams each train layer by layer: publish, gather from all ranks, GEMM, fold, retire, with the
// events and words that this takes. Items are records.
#include <benchmark/benchmark.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <string>
#include <vector>

#include "base/fail.h"
#include "device/record/check.h"
#include "device/record/log_file.h"
#include "device/record/logs_testing.h"

namespace tessera::device {
namespace {

constexpr int kRanks = 4;
constexpr uint64_t kLayers = 32;
constexpr uint64_t kRowsBytes = 4096;                   // of a layer, on each rank
constexpr uint64_t kGatheredAt = kLayers * kRowsBytes;  // two buffers of whole layers, in turns
constexpr uint64_t kLayerBytes = kRanks * kRowsBytes;

class TrainingLogs {
 public:
  TrainingLogs() : logs_(kRanks) {
    for (int rank = 0; rank < kRanks; ++rank)
      streams_.push_back({logs_.stream(rank, "publish"), logs_.stream(rank, "gather"), logs_.stream(rank, "compute")});
  }

  std::vector<RankLog>& with(size_t records) {
    for (uint64_t version = 1; count() < records; ++version)
      for (int rank = 0; rank < kRanks; ++rank) step(rank, version);
    return logs_.all();
  }

 private:
  struct Streams {
    HandLogs::Actor publish, gather, compute;
  };

  size_t count() {
    size_t records = 0;
    for (const RankLog& log : logs_.all()) records += log.records().size();
    return records;
  }

  static WordEdge published(int rank, uint64_t layer, uint64_t version) { return {rank, layer, version}; }
  static WordEdge retired(int rank, uint64_t version) { return {rank, kLayers, version}; }

  void step(int rank, uint64_t version) {
    const Streams& s = streams_[static_cast<size_t>(rank)];
    for (int peer = 0; peer < kRanks && version > 1; ++peer) logs_.see(rank, retired(peer, version - 1));
    for (uint64_t layer = 0; layer < kLayers; ++layer)
      logs_.operation(s.publish, "publish", {writes(rank, layer * kRowsBytes, (layer + 1) * kRowsBytes, version)}, {},
                      {published(rank, layer, version)});
    std::array<uint64_t, 2> used{};
    for (uint64_t layer = 0; layer < kLayers; ++layer) {
      const uint64_t buffer = kGatheredAt + layer % 2 * kLayerBytes;
      if (used[layer % 2] != 0) logs_.wait(s.gather, used[layer % 2]);
      for (int i = 0; i < kRanks; ++i) {
        const int owner = (rank + i) % kRanks;
        const uint64_t at = buffer + static_cast<uint64_t>(owner) * kRowsBytes;
        logs_.operation(s.gather, "gather",
                        {reads(owner, layer * kRowsBytes, (layer + 1) * kRowsBytes, version),
                         writes(rank, at, at + kRowsBytes, version)},
                        {published(owner, layer, version)});
      }
      logs_.wait(s.compute, logs_.record(s.gather));
      logs_.operation(s.compute, "gemm", {reads(rank, buffer, buffer + kLayerBytes, version)});
      used[layer % 2] = logs_.record(s.compute);
    }
    logs_.wait(HandLogs::host(rank), used[(kLayers - 1) % 2]);
    logs_.set(rank, retired(rank, version).word, version);
  }

  HandLogs logs_;
  std::vector<Streams> streams_;
};

std::vector<RankLog>& training_logs() {
  static TrainingLogs logs;
  static std::vector<RankLog>& full = logs.with(1'000'000);
  return full;
}

size_t records_of(const std::vector<RankLog>& logs) {
  size_t records = 0;
  for (const RankLog& log : logs) records += log.records().size();
  return records;
}

void check_logs(benchmark::State& state) {
  const std::vector<RankLog>& logs = training_logs();
  CheckReport report;
  for (auto _ : state) report = check_schedule(logs);
  TESSERA_CHECK(report.ok() && report.unreached == 0);
  state.SetItemsProcessed(state.iterations() * static_cast<int64_t>(report.records));
  state.counters["records"] = static_cast<double>(report.records);
  state.counters["accesses"] = static_cast<double>(report.accesses);
}
BENCHMARK(check_logs)->Unit(benchmark::kMillisecond);

struct Folder {
  Folder() {
    char name[] = "/tmp/tessera-record-bench-XXXXXX";
    path = ::mkdtemp(name);
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::filesystem::path path;
};

size_t write_logs(const std::vector<RankLog>& logs, const std::filesystem::path& folder) {
  size_t bytes = 0;
  for (const RankLog& log : logs) {
    const std::filesystem::path path = folder / std::to_string(log.head().rank);
    LogFile file(path, log.head());
    for (const Record& record : log.records()) file.append(record);
    file.flush();
    bytes += std::filesystem::file_size(path);
  }
  return bytes;
}

void write_files(benchmark::State& state) {
  const std::vector<RankLog>& logs = training_logs();
  const Folder folder;
  size_t bytes = 0;
  for (auto _ : state) bytes = write_logs(logs, folder.path);
  state.SetItemsProcessed(state.iterations() * static_cast<int64_t>(records_of(logs)));
  state.counters["bytes_per_record"] = static_cast<double>(bytes) / static_cast<double>(records_of(logs));
}
BENCHMARK(write_files)->Unit(benchmark::kMillisecond);

void read_files(benchmark::State& state) {
  const std::vector<RankLog>& logs = training_logs();
  const Folder folder;
  write_logs(logs, folder.path);
  size_t records = 0;
  for (auto _ : state)
    for (const RankLog& log : logs) records += read_log(folder.path / std::to_string(log.head().rank)).records().size();
  TESSERA_CHECK_EQ(records, state.iterations() * records_of(logs));
  state.SetItemsProcessed(static_cast<int64_t>(records));
}
BENCHMARK(read_files)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace tessera::device

BENCHMARK_MAIN();
