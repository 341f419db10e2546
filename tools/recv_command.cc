#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "base/fail.h"
#include "bus/registration/manifest.h"
#include "checkpoint/shown.h"
#include "tessera/checkpoint.h"
#include "tools/checkpoint_io.h"
#include "tools/commands.h"
#include "tools/follow.h"
#include "tools/held_tensors.h"
#include "tools/interrupt.h"
#include "tools/job_options.h"
#include "tools/layout_rules.h"
#include "tools/list_option.h"
#include "tools/option_checks.h"
#include "tools/transfer_report.h"
#include "tools/wire_rules.h"

namespace tessera::tools {
namespace {

constexpr char kRecvExamples[] = R"(Examples:
  One of two ranks that take a model as column shards, in bf16, and write their parts:
    tessera recv --job inference --peer trainer --pair weights --rank 0 --world 2 \
      --layout '.*bias=tp=2:R' --layout '.*=tp=2:S1' --dtype bf16 --out weights/

  Three versions, each checked against the file it came from:
    tessera recv --job inference --peer trainer --layout '.*=2:S0' --count 3 --verify step1 step2 step3)";

struct RecvOptions {
  JobOptions job;
  std::string dtype;
  std::vector<std::string> skip;
  std::optional<int> count;
  std::string out;
  std::vector<std::string> verify;
  bool staged = false;
};

// How many versions to take: --count, or one for each --verify, or one.
int versions_of(const RecvOptions& options) {
  const int verified = static_cast<int>(options.verify.size());
  const int count = options.count.value_or(verified > 0 ? verified : 1);
  if (verified > 0 && verified != count)
    fail(ErrorCode::kInvalidArgument, "--verify is given {} times for {} versions: give it once a version"_message,
         verified, count);
  return count;
}

std::optional<DType> target_dtype(const std::string& name) {
  if (name.empty()) return std::nullopt;
  const DType dtype = parse_dtype(name);
  if (!is_castable_float(dtype))
    fail(ErrorCode::kInvalidArgument, "--dtype {}: a plain cast goes to f64, f32, f16 or bf16"_message, name);
  return dtype;
}

// The offered tensors without --skip, in the dtypes requested here. What is quantised already is received dequantised.
std::vector<TensorInfo> wanted_tensors(const std::vector<ManifestEntry>& manifest, const NameFilter& skip,
                                       std::optional<DType> dtype) {
  std::vector<TensorInfo> tensors;
  for (const ManifestEntry& entry : manifest) {
    if (skip.matches(entry.name)) continue;
    const DType offered = entry.planes.empty() ? entry.dtype : DType::kF32;
    const bool cast = dtype && is_castable_float(offered);
    tensors.push_back({entry.name, cast ? *dtype : offered, entry.shape});
  }
  if (tensors.empty())
    fail(ErrorCode::kInvalidArgument, "nothing to receive: {} tensors are offered and --skip leaves none"_message,
         manifest.size());
  return tensors;
}

// The format that each tensor travels in, as the jobs have agreed.
std::vector<std::optional<Format>> agreed_wires(const std::vector<ManifestEntry>& manifest,
                                                std::span<const TensorInfo> tensors, const WireRules& rules) {
  std::vector<std::optional<Format>> wires;
  for (const TensorInfo& tensor : tensors) {
    const auto offered = std::ranges::find(manifest, tensor.name, &ManifestEntry::name);
    const bool asks = bus::can_be_quantised(tensor.dtype, tensor.shape);
    wires.push_back(offered->wire || !asks ? offered->wire : rules.find(tensor.name));
  }
  return wires;
}

void check_no_partial(const std::vector<TensorInfo>& tensors, const std::vector<Layout>& layouts) {
  for (size_t i = 0; i < tensors.size(); ++i)
    if (layouts[i].has_partial())
      fail(
          ErrorCode::kInvalidArgument,
          "tensor {}: layout {}: a receiver cannot be Partial: a transfer cannot choose how to split a value into terms"_message,
          checkpoint::shown(tensors[i].name), layouts[i].to_string());
}

std::filesystem::path make_folder(const std::string& name) {
  std::error_code error;
  std::filesystem::create_directories(name, error);
  if (error) fail_errno(fmt::format("--out {}: cannot make the folder", name), error.value());
  return name;
}

ExitStatus run_recv(const RecvOptions& options, Interrupt& interrupt) {
  TransferReport report{
      .command = "recv", .bus = options.job.bus(), .pair = options.job.pair_options(), .stats = {}, .transfers = {}};
  report.bus.timeout = report.pair.timeout;
  report.bus.stop = interrupt.stop_token();
  const Timeout timeout = options.job.transfer_timeout();
  const LayoutRules rules = LayoutRules::parse(options.job.layouts);
  const WireRules wire_rules = WireRules::parse(options.job.wires);
  const NameFilter skip = NameFilter::parse(options.skip, "--skip");
  const std::optional<DType> dtype = target_dtype(options.dtype);
  const int versions = versions_of(options);
  std::vector<Checkpoint> checkpoints;
  for (const std::string& path : options.verify) checkpoints.push_back(Checkpoint::open(path));
  for (const Checkpoint& checkpoint : checkpoints)
    verify_checksums(checkpoint, interrupt, "give --verify the file that was sent");
  const std::filesystem::path folder = options.out.empty() ? std::filesystem::path() : make_folder(options.out);

  Bus bus(report.bus);
  Pair pair = bus.pair(report.pair);
  const std::vector<ManifestEntry> manifest = pair.manifest(kBatchId, report.pair.timeout);
  std::vector<std::string> names;
  for (const ManifestEntry& entry : manifest) names.push_back(entry.name);
  skip.require_matches(names, "--skip");
  wire_rules.require_matches(names);
  std::vector<TensorInfo> tensors = wanted_tensors(manifest, skip, dtype);
  const std::vector<std::optional<Format>> wires = agreed_wires(manifest, tensors, wire_rules);
  std::vector<Layout> layouts = rules.assign(tensors);
  check_no_partial(tensors, layouts);
  const HeldTensors held(std::move(tensors), std::move(layouts), report.bus.rank, report.bus.world);
  Batch batch = pair.accept(kBatchId, held.specs(wire_rules), report.pair.timeout,
                            {.mode = options.staged ? Mode::kStaged : Mode::kInPlace,
                             .pinned = options.job.pinned,
                             .delta = options.job.delta});
  const std::string label = fmt::format("recv {}/{}", report.pair.name, report.bus.rank);
  for (int i = 0; i < versions; ++i) {
    interrupt.check();
    Handle handle = batch.recv(std::nullopt, timeout);
    Transfer& transfer = report.transfers.emplace_back();
    transfer.version = follow(handle, label, interrupt);
    transfer.progress = handle.progress();
    transfer.digests = batch.digests();
    note_stats(batch.stats(), report, transfer);
    if (!checkpoints.empty()) {
      verify_slices(checkpoints[static_cast<size_t>(i)], held, wires, interrupt);
      transfer.verified = true;
    }
    if (!folder.empty()) transfer.file = write_slices(folder, held, transfer.version).string();
    if (!options.job.json) fmt::print("{}\n", describe(report, transfer));
  }
  const std::string end = options.job.json ? to_json(report) : describe_quantised(report.stats);
  if (!end.empty()) fmt::print("{}\n", end);
  return ExitStatus::kOk;
}

}  // namespace

void add_recv_command(CLI::App& app, Run& run) {
  CLI::App& command =
      *app.add_subcommand("recv", "Receive what is offered, as one rank of the receiving job")->footer(kRecvExamples);
  const auto options = std::make_shared<RecvOptions>();
  options->job.declare(command);
  command.add_option("--dtype", options->dtype, "Cast f64, f32, f16 and bf16 tensors to this dtype")
      ->check(not_empty());
  add_list(command, "--skip", options->skip, "REGEX of whole tensor names to leave out; repeatable");
  command.add_option("--count", options->count, "Number of versions to take, one after another (default: 1)")
      ->check(whole_number("a count", std::numeric_limits<int>::max()));
  command.add_flag("--staged", options->staged,
                   "Take a version on all ranks of this job or on none (needs the memory twice)");
  command.add_option("--out", options->out, "Folder for rank-NNNNN.safetensors with this rank's local tensors")
      ->check(not_empty());
  add_list(command, "--verify", options->verify,
           "Checkpoint to compare every element with, quantised as the transfer was; repeat it for each version");
  command.callback(
      [options, &run] { run = [options](Interrupt& interrupt) { return run_recv(*options, interrupt); }; });
}

}  // namespace tessera::tools
