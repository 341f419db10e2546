// Schedule logs of a made-up training (etp/training_logs.h): to check, write and read a million records. Items are
// records.
//
//   bin/record_bench [--benchmark_filter=...]
#include <benchmark/benchmark.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "base/fail.h"
#include "bench/etp/training_logs.h"
#include "device/record/check.h"
#include "device/record/log_file.h"

namespace tessera::device {
namespace {

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
