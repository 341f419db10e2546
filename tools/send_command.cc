#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "base/fail.h"
#include "checkpoint/shown.h"
#include "tessera/bus.h"
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

constexpr char kSendExamples[] = R"(Examples:
  One of four ranks that hold a model as FSDP shards:
    tessera send --job trainer --peer inference --pair weights --rank 0 --world 4 \
      --checkpoint model.safetensors --layout '.*=fsdp=4:S0'

  Norms replicated, the rest in rows; two versions, one after the other:
    tessera send --job trainer --peer inference --checkpoint step1 --checkpoint step2 \
      --layout '.*norm.*=4:R' --layout '.*=4:S0')";

struct SendOptions {
  JobOptions job;
  std::vector<std::string> checkpoints;
  std::optional<int64_t> version;
  bool unverified = false;
};

void check_versions(const SendOptions& options) {
  const auto count = static_cast<int64_t>(options.checkpoints.size());
  if (options.version && *options.version > kMaxVersion - count + 1)
    fail(ErrorCode::kInvalidArgument, "--version {} for {} checkpoints: the last version would be above {}"_message,
         *options.version, count, kMaxVersion);
}

std::vector<TensorInfo> sorted_tensors(const Checkpoint& checkpoint) {
  std::vector<TensorInfo> tensors(checkpoint.tensors().begin(), checkpoint.tensors().end());
  std::ranges::sort(tensors, {}, &TensorInfo::name);
  return tensors;
}

std::string describe(const TensorInfo* info) {
  return info == nullptr ? "absent" : fmt::format("{} {}", to_string(info->dtype), to_string_shape(info->shape));
}

// All versions of a batch must have the same tensors.
void check_same_tensors(const Checkpoint& first, const Checkpoint& other) {
  const auto complain = [&](const std::string& name) {
    fail(ErrorCode::kInvalidArgument,
         "tensor {} is {} in {} and {} in {}: all checkpoints must hold the same tensors"_message,
         checkpoint::shown(name), describe(first.find(name)), first.path().string(), describe(other.find(name)),
         other.path().string());
  };
  for (const TensorInfo& info : first.tensors())
    if (const TensorInfo* found = other.find(info.name); found == nullptr || *found != info) complain(info.name);
  for (const TensorInfo& info : other.tensors())
    if (first.find(info.name) == nullptr) complain(info.name);
}

std::vector<Checkpoint> open_all(const std::vector<std::string>& paths) {
  std::vector<Checkpoint> checkpoints;
  for (const std::string& path : paths) {
    checkpoints.push_back(Checkpoint::open(path));
    check_same_tensors(checkpoints.front(), checkpoints.back());
  }
  return checkpoints;
}

ExitStatus run_send(const SendOptions& options, Interrupt& interrupt) {
  TransferReport report{
      .command = "send", .bus = options.job.bus(), .pair = options.job.pair_options(), .stats = {}, .transfers = {}};
  report.bus.timeout = report.pair.timeout;
  report.bus.stop = interrupt.stop_token();
  const Timeout timeout = options.job.transfer_timeout();
  check_versions(options);
  const LayoutRules rules = LayoutRules::parse(options.job.layouts);
  const WireRules wires = WireRules::parse(options.job.wires);
  const std::vector<Checkpoint> checkpoints = open_all(options.checkpoints);
  std::vector<TensorInfo> tensors = sorted_tensors(checkpoints.front());
  std::vector<std::string> names;
  for (const TensorInfo& tensor : tensors) names.push_back(tensor.name);
  wires.require_matches(names);
  std::vector<Layout> layouts = rules.assign(tensors);
  const HeldTensors held(std::move(tensors), std::move(layouts), report.bus.rank, report.bus.world);
  if (!options.unverified)
    for (const Checkpoint& checkpoint : checkpoints)
      verify_checksums(checkpoint, interrupt, "--no-verify sends what is there");
  load_slices(checkpoints.front(), held, interrupt);

  Bus bus(report.bus);
  Pair pair = bus.pair(report.pair);
  Batch batch = pair.offer(kBatchId, held.specs(wires), report.pair.timeout,
                           {.pinned = options.job.pinned, .delta = options.job.delta});
  const std::string label = fmt::format("send {}/{}", report.pair.name, report.bus.rank);
  for (size_t i = 0; i < checkpoints.size(); ++i) {
    if (i > 0) load_slices(checkpoints[i], held, interrupt);
    interrupt.check();
    const auto version = options.version ? std::optional(*options.version + static_cast<int64_t>(i)) : std::nullopt;
    Handle handle = batch.send(version, timeout);
    Transfer& transfer = report.transfers.emplace_back();
    transfer.version = follow(handle, label, interrupt);
    transfer.progress = handle.progress();
    transfer.digests = batch.digests();
    note_stats(batch.stats(), report, transfer);
    if (!options.job.json) fmt::print("{}\n", describe(report, transfer));
  }
  const std::string end = options.job.json ? to_json(report) : describe_quantised(report.stats);
  if (!end.empty()) fmt::print("{}\n", end);
  return ExitStatus::kOk;
}

}  // namespace

void add_send_command(CLI::App& app, Run& run) {
  CLI::App& command =
      *app.add_subcommand("send", "Offer a checkpoint, as one rank of the sending job")->footer(kSendExamples);
  const auto options = std::make_shared<SendOptions>();
  options->job.declare(command);
  add_list(command, "--checkpoint", options->checkpoints,
           "A .safetensors file, an index of several, or a folder with either; repeated: one version each")
      ->required();
  command
      .add_option("--version", options->version,
                  "Version of the first checkpoint; the others follow (default: the last one + 1)")
      ->check(whole_number("a version", kMaxVersion));
  command.add_flag("--no-verify", options->unverified,
                   "Send a checkpoint without reading all of it to compare it with the checksums that it notes");
  command.callback(
      [options, &run] { run = [options](Interrupt& interrupt) { return run_send(*options, interrupt); }; });
}

}  // namespace tessera::tools
