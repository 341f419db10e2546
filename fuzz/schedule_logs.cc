#include "fuzz/schedule_logs.h"

#include <fmt/format.h>

#include "base/bytes.h"
#include "device/record/log_file.h"
#include "device/record/logs_testing.h"

namespace tessera::fuzz {
namespace {

using device::HandLogs;
using device::RankLog;
using device::reads;
using device::RecordKind;
using device::writes;

void append(std::string& text, std::span<const std::byte> bytes) {
  text.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

// Two versions of one weight that rank 0 publishes and rank 1 gathers and uses.
HandLogs exchange(bool retire_is_awaited) {
  HandLogs logs(2);
  const auto publish = logs.stream(0, "publish");
  const auto gather = logs.stream(1, "gather");
  const auto compute = logs.stream(1, "compute");
  logs.collective_of_all(1);
  int64_t now = 1'000'000;
  for (uint64_t version = 1; version <= 2; ++version) {
    const bool waits = version > 1 && retire_is_awaited;
    const uint64_t published = logs.enqueue(publish, "publish", {writes(0, 0, 4096, version)}, waits ? 1 : 0,
                                            {{.rank = 0, .word = 3, .value = version}});
    if (waits) logs.begins(publish, published, {{.rank = 1, .word = 4, .value = version - 1}});
    logs.ran(publish, published, now, now + 1500);
    const uint64_t gathered =
        logs.operation(gather, "gather", {reads(0, 1024, 2048, version), writes(1, 0, 1024, version)},
                       {{.rank = 0, .word = 3, .value = version}});
    logs.ran(gather, gathered, now + 1600, now + 2600);
    logs.wait(compute, logs.record(gather));
    const uint64_t used =
        logs.operation(compute, "gemm", {reads(1, 0, 1024, version)}, {}, {{.rank = 1, .word = 4, .value = version}});
    logs.ran(compute, used, now + 2700, now + 9000);
    logs.wait(gather, logs.record(compute));
    now += 10'000;
  }
  return logs;
}

// All kinds of records that exchange() does not have.
HandLogs rest() {
  HandLogs logs(1);
  logs.access(0, "update", {writes(0, 0, 64), {.region = {.owner = 0}, .offset = 0x7f0000001000, .bytes = 64}});
  logs.set(0, 5, 1);
  logs.see(0, {.rank = 0, .word = 5, .value = 1});
  logs.add(HandLogs::host(0), {.kind = RecordKind::kRegionEnd, .region = {.owner = 0, .number = 1}});
  return logs;
}

device::LogEncoder encode(const RankLog& log) {
  device::LogEncoder encoder;
  for (const device::Record& record : log.records()) encoder.append(record);
  return encoder;
}

std::string file_of(const RankLog& log) {
  const device::LogEncoder encoder = encode(log);
  std::string file = "f";
  append(file, device::log_head(log.head()));
  append(file, device::block_head(log.head(), 0, encoder.block()));
  append(file, encoder.block());
  return file;
}

std::string blocks_of(std::vector<RankLog>& logs) {
  ByteWriter out;
  out.put('b');
  for (const RankLog& log : logs) out.put_bytes(encode(log).block());
  std::string input;
  append(input, out.view());
  return input;
}

}  // namespace

std::vector<ScheduleSeed> schedule_seeds() {
  std::vector<ScheduleSeed> seeds;
  for (const auto& [name, right] : {std::pair("right", true), std::pair("wrong", false)}) {
    HandLogs logs = exchange(right);
    for (const RankLog& log : logs.all())
      seeds.push_back({fmt::format("{}-rank{}", name, log.head().rank), file_of(log)});
    seeds.push_back({fmt::format("{}-blocks", name), blocks_of(logs.all())});
  }
  HandLogs others = rest();
  seeds.push_back({"other-kinds", file_of(others[0])});
  seeds.push_back({"other-kinds-block", blocks_of(others.all())});
  std::string torn = file_of(others[0]);
  append(torn, std::vector<std::byte>(5));
  seeds.push_back({"torn", torn});
  return seeds;
}

}  // namespace tessera::fuzz
