#include "tools/transfer_report.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "tools/progress_bar.h"

namespace tessera::tools {
namespace {

using Json = nlohmann::ordered_json;

Json json_of(const Transfer& transfer) {
  Json json{{"version", transfer.version},
            {"bytes", transfer.progress.bytes_done},
            {"seconds", transfer.progress.seconds},
            {"gigabytes_per_second", transfer.progress.gigabytes_per_second()},
            {"verified", transfer.verified}};
  if (transfer.delta_routes > 0)
    json["delta"] = {
        {"routes", transfer.delta_routes}, {"bytes", transfer.delta_bytes}, {"full_bytes", transfer.delta_full_bytes}};
  if (!transfer.file.empty()) json["file"] = transfer.file;
  return json;
}

std::string describe_deltas(const Transfer& transfer) {
  if (transfer.delta_routes == 0) return {};
  return fmt::format(", {} of it as deltas of {}", format_bytes(transfer.delta_full_bytes),
                     format_bytes(transfer.delta_bytes));
}

Json json_of_quantised(const BatchStats& stats) {
  return {{"elements", stats.quantized_elements},
          {"bytes", stats.quantized_bytes},
          {"source_bytes", stats.quantized_source_bytes},
          {"bf16_ratio", stats.quantized_ratio()},
          {"elements_moved", stats.quantized_elements_moved},
          {"bytes_moved", stats.quantized_bytes_moved},
          {"batch_bf16_ratio", stats.batch_ratio()},
          {"amax_exchanges", stats.amax_exchanges}};
}

}  // namespace

void note_stats(const BatchStats& now, TransferReport& report, Transfer& transfer) {
  transfer.delta_routes = now.delta_routes - report.stats.delta_routes;
  transfer.delta_bytes = now.delta_bytes - report.stats.delta_bytes;
  transfer.delta_full_bytes = now.delta_full_bytes - report.stats.delta_full_bytes;
  report.stats = now;
}

std::string describe_quantised(const BatchStats& stats) {
  if (stats.quantized_elements_moved == 0) return {};
  return fmt::format("quantised: {} of {} as bf16 ({:.3f}); the whole batch: {} ({:.3f})",
                     format_bytes(stats.quantized_bytes),
                     format_bytes(bytes_of(DType::kBF16, stats.quantized_elements)), stats.quantized_ratio(),
                     format_bytes(stats.bytes_moved), stats.batch_ratio());
}

std::string describe(const TransferReport& report, const Transfer& transfer) {
  return fmt::format(
      "{} {}/{}: version {}: {} tensors, {} here ({} in all, lower bound {}), {:.3f} s, {:.2f} GB/s{}{}{}",
      report.command, report.bus.job, report.bus.rank, transfer.version, report.stats.tensors,
      format_bytes(transfer.progress.bytes_done), format_bytes(report.stats.bytes_moved),
      format_bytes(report.stats.bytes_lower_bound), transfer.progress.seconds, transfer.progress.gigabytes_per_second(),
      describe_deltas(transfer), transfer.verified ? ", verified" : "",
      transfer.file.empty() ? "" : ", written to " + transfer.file);
}

std::string to_json(const TransferReport& report) {
  const Transfer& last = report.transfers.back();
  Json json{{"command", report.command},
            {"job", report.bus.job},
            {"rank", report.bus.rank},
            {"world", report.bus.world},
            {"peer", report.pair.peer},
            {"pair", report.pair.name},
            {"version", last.version},
            {"tensors", report.stats.tensors},
            {"skipped", report.stats.skipped},
            {"routes", report.stats.routes},
            {"bytes_moved", report.stats.bytes_moved},
            {"bytes_lower_bound", report.stats.bytes_lower_bound},
            {"rank_bytes", report.stats.rank_bytes},
            {"quantized", json_of_quantised(report.stats)},
            {"register_seconds", report.stats.register_seconds},
            {"seconds", last.progress.seconds},
            {"gigabytes_per_second", last.progress.gigabytes_per_second()}};
  json["transfers"] = Json::array();
  for (const Transfer& transfer : report.transfers) json["transfers"].push_back(json_of(transfer));
  json["digests"] = Json::array();
  for (const TensorDigest& digest : last.digests)
    json["digests"].push_back({{"name", digest.name}, {"digest", digest.to_string()}, {"elements", digest.elements}});
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);  // names of files may not be UTF-8
}

}  // namespace tessera::tools
