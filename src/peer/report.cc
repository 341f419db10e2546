#include "peer/report.h"

#include <algorithm>

namespace tessera {
namespace {

constexpr uint32_t kMaxReportName = 64;
constexpr uint32_t kMaxReportNameSpace = 256;
constexpr uint32_t kMaxReportText = 1024;
constexpr uint32_t kMaxBatches = 4096;
constexpr uint32_t kMaxPeers = 256;
constexpr uint32_t kMaxWaits = 256;

void put_text(std::string_view text, ByteWriter& out) {
  out.put_string(text.substr(0, kMaxReportText));
}

template <typename T, typename Write>
void put_list(const std::vector<T>& items, uint32_t most, ByteWriter& out, const Write& write) {
  const auto count = static_cast<uint32_t>(std::min<size_t>(items.size(), most));
  out.put(count);
  for (uint32_t i = 0; i < count; ++i) write(items[i]);
}

template <typename T, typename Read>
std::vector<T> get_list(ByteReader& in, uint32_t most, size_t least_bytes, const Read& read) {
  std::vector<T> items;
  for (uint32_t count = in.get_count(most, least_bytes); count > 0; --count) items.push_back(read());
  return items;
}

void put_waits(const std::vector<Wait>& waits, ByteWriter& out) {
  put_list(waits, kMaxWaits, out, [&](const Wait& wait) {
    put_text(wait.text, out);
    out.put(wait.microseconds);
  });
}

std::vector<Wait> get_waits(ByteReader& in) {
  return get_list<Wait>(in, kMaxWaits, 12, [&] {
    Wait wait;
    wait.text = in.get_string(kMaxReportText);
    wait.microseconds = in.get<int64_t>();
    return wait;
  });
}

void put_batch(const BatchReport& batch, ByteWriter& out) {
  out.put_string(batch.pair);
  out.put_string(batch.id);
  for (const bool flag : {batch.sends, batch.staged, batch.torn, batch.undecided}) out.put(flag);
  for (const int64_t number : {batch.version, batch.newest, batch.transfers, batch.bytes}) out.put(number);
  put_list(batch.peers, kMaxPeers, out, [&](const BatchReport::Peer& peer) {
    out.put_string(peer.job);
    out.put(peer.world);
    out.put(peer.attached);
  });
  put_text(batch.operation, out);
  put_text(batch.phase, out);
  for (const int64_t number :
       {batch.operation_version, batch.operation_microseconds, batch.bytes_done, batch.bytes_total})
    out.put(number);
  put_waits(batch.waits, out);
}

BatchReport get_batch(ByteReader& in) {
  BatchReport batch;
  batch.pair = in.get_string(kMaxReportName);
  batch.id = in.get_string(kMaxReportName);
  for (bool* flag : {&batch.sends, &batch.staged, &batch.torn, &batch.undecided}) *flag = in.get_bool();
  for (int64_t* number : {&batch.version, &batch.newest, &batch.transfers, &batch.bytes}) *number = in.get<int64_t>();
  batch.peers = get_list<BatchReport::Peer>(in, kMaxPeers, 9, [&] {
    BatchReport::Peer peer;
    peer.job = in.get_string(kMaxReportName);
    peer.world = in.get<int32_t>();
    peer.attached = in.get_bool();
    return peer;
  });
  batch.operation = in.get_string(kMaxReportText);
  batch.phase = in.get_string(kMaxReportText);
  for (int64_t* number :
       {&batch.operation_version, &batch.operation_microseconds, &batch.bytes_done, &batch.bytes_total})
    *number = in.get<int64_t>();
  batch.waits = get_waits(in);
  return batch;
}

}  // namespace

void Inspect::write(ByteWriter& out) const {
  out.put(newest);
}

Inspect Inspect::read(ByteReader& in) {
  return {.newest = in.get<uint16_t>()};
}

void Report::write(ByteWriter& out) const {
  out.put(kReportVersion);
  out.put_string(release);
  out.put_string(name_space);
  out.put_string(job);
  out.put(rank);
  out.put(world);
  incarnation.write(out);
  out.put(commands.queued);
  out.put(commands.capacity);
  put_waits(waits, out);
  put_list(batches, kMaxBatches, out, [&](const BatchReport& batch) { put_batch(batch, out); });
}

Report Report::read(ByteReader& in) {
  if (const auto version = in.get<uint16_t>(); version != kReportVersion)
    fail(ErrorCode::kMismatch, "Report: version {}, this release reads {}", version, kReportVersion);
  Report report;
  report.release = in.get_string(kMaxReportName);
  report.name_space = in.get_string(kMaxReportNameSpace);
  report.job = in.get_string(kMaxReportName);
  report.rank = in.get<Rank>();
  report.world = in.get<int32_t>();
  report.incarnation = Incarnation::read(in);
  report.commands.queued = in.get<uint32_t>();
  report.commands.capacity = in.get<uint32_t>();
  if (report.commands.queued > report.commands.capacity)
    fail(ErrorCode::kInvalidArgument, "Report: {} commands in a queue of {}", report.commands.queued,
         report.commands.capacity);
  report.waits = get_waits(in);
  report.batches = get_list<BatchReport>(in, kMaxBatches, 88, [&] { return get_batch(in); });
  return report;
}

}  // namespace tessera
