#include <algorithm>
#include <sstream>

#include "device/record/check.h"
#include "device/record/log_file.h"
#include "device/record/timeline.h"
#include "fuzz/targets.h"

namespace tessera::fuzz {
namespace {

using device::CheckReport;
using device::LogHead;
using device::RankLog;
using device::Record;

constexpr size_t kMostRanks = 4;
constexpr size_t kMostConflicts = 20;

bool same(const Record& a, const Record& b) {
  return a.kind == b.kind && a.actor == b.actor && a.operation == b.operation && a.waits == b.waits &&
         a.event == b.event && a.number == b.number && a.ranks == b.ranks && a.region == b.region &&
         a.bytes == b.bytes && a.begin == b.begin && a.end == b.end && a.name == b.name && a.subject == b.subject &&
         std::ranges::equal(a.accesses, b.accesses) && std::ranges::equal(a.words, b.words);
}

RankLog read_block(const LogHead& head, std::span<const std::byte> block) {
  std::vector<std::byte> file = device::log_head(head);
  for (const auto& part : {device::block_head(head, 0, block), {block.begin(), block.end()}})
    file.insert(file.end(), part.begin(), part.end());
  return device::read_log(file, "log");
}

void expect_same_again(const RankLog& log) {
  device::LogEncoder encoder;
  for (const Record& record : log.records()) encoder.append(record);
  if (encoder.block().empty()) return;
  const RankLog again = read_block(log.head(), encoder.block());
  TESSERA_CHECK(std::ranges::equal(log.records(), again.records(), same));
}

void use(std::span<const RankLog> logs) {
  const CheckReport report = check_schedule(logs, {.most_conflicts = kMostConflicts});
  TESSERA_CHECK_LE(report.conflicts.size(), kMostConflicts);
  TESSERA_CHECK_LE(report.unreached, report.records);
  for (const device::Conflict& conflict : report.conflicts) {
    TESSERA_CHECK_LT(conflict.begin, conflict.end);
    TESSERA_CHECK(conflict.first.write || conflict.second.write);
    TESSERA_CHECK(!conflict.to_string().empty() && !conflict.missing.empty());
  }
  accepts([&] {
    std::ostringstream out;
    write_timeline(logs, out);
  });
}

}  // namespace

bool schedule(Input input) {
  return accepts([&] {
    ByteReader in(input, "input");
    std::vector<RankLog> logs;
    switch (in.get<char>()) {
      case 'f':
        logs.push_back(device::read_log(in.rest(), "log"));
        break;
      case 'b': {
        std::vector<std::span<const std::byte>> blocks;
        while (in.left() > 0 && blocks.size() < kMostRanks) blocks.push_back(in.get_bytes(1 << 20));
        for (size_t rank = 0; rank < blocks.size(); ++rank)
          logs.push_back(read_block(
              {.run = 7, .rank = static_cast<int>(rank), .ranks = static_cast<int>(blocks.size())}, blocks[rank]));
        break;
      }
      default:
        fail(ErrorCode::kInvalidArgument, "no such kind"_message);
    }
    for (const RankLog& log : logs) expect_same_again(log);
    accepts([&] { use(logs); });  // a log of one rank of several cannot be checked
  });
}

}  // namespace tessera::fuzz
