#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/fail.h"
#include "etp/schedule/plan.h"
#include "layout/text_reader.h"
#include "plan/text.h"
#include "tools/etp/commands.h"
#include "tools/etp/model.h"
#include "tools/list_option.h"
#include "tools/option_checks.h"

namespace tessera::tools {
namespace {

using plan::bytes_text;
using plan::count_text;

constexpr char kEtpPlanExamples[] = R"(Examples:
  tessera etp plan --model model.safetensors --group 8 --dtype bf16
  tessera etp plan --model weights.txt --group 4 --format '.*(fc1|fc2).*=nvfp4' --distance 2 --cap 1GiB

A list has a line NAME ROWS COLUMNS DTYPE [FORMAT] for each weight, in the order of use; '#' begins a comment. The
weights of a checkpoint are taken in the natural order of their names. One step uses all of them forward, then backward
in reverse order, without those that are called "embedding".

Formats: f32, bf16, f16, fp8_e4m3, mxfp8, fp8_block_128x128, nvfp4.)";

constexpr size_t kShownUses = 40;         // of the table of uses
constexpr int64_t kReplicatedCopies = 3;  // the parameter, its gradient, and the bucket in which that is folded

struct EtpPlanArguments {
  std::string model;
  EtpModelOptions sharding{};
  etp::PrefetchOptions prefetch{};
  int64_t cap_bytes = -1;
  std::string dtype;
  std::vector<std::string> formats;
  int micro_batches = 1;
  bool recompute = false;
  bool forward_only = false;
  bool json = false;
};

struct EtpPlan {
  EtpModel model;
  etp::PrefetchPlan prefetches{};
  int64_t uncapped_peak = 0;
  int64_t largest_use = 0;
  etp::RuntimeForecast rank_bytes{};
};

EtpPlan make_plan(const EtpPlanArguments& arguments) {
  EtpModelOptions sharding = arguments.sharding;
  if (!arguments.dtype.empty()) sharding.dtype = etp::WeightFormat(parse_dtype(arguments.dtype)).dtype();
  etp::PrefetchOptions options = arguments.prefetch;
  if (arguments.cap_bytes >= 0) options.cap_bytes = arguments.cap_bytes;

  EtpPlan result{.model =
                     shard_model(read_model(arguments.model), WeightFormatRules::parse(arguments.formats), sharding)};
  const EtpModel& model = result.model;
  if (model.names.empty())
    fail(ErrorCode::kInvalidArgument, "{}: none of its {} tensors would be sharded: --min-elements is {}"_message,
         arguments.model, model.replicated, sharding.min_elements);
  const std::vector<etp::Consumption> uses = etp::expected_step({.names = model.names,
                                                                 .costs = model.costs,
                                                                 .micro_batches = arguments.micro_batches,
                                                                 .backward = !arguments.forward_only,
                                                                 .recompute = arguments.recompute});
  result.prefetches = etp::plan_prefetch(uses, model.costs, options);
  options.cap_bytes.reset();
  result.uncapped_peak = etp::plan_prefetch(uses, model.costs, options).peak_bytes;
  for (const etp::Consumption& use : uses)
    result.largest_use = std::max(result.largest_use, model.costs[use.weight].bytes(use.plane));
  result.rank_bytes = etp::forecast_rank({.weights = model.weights,
                                          .replicated_bytes = kReplicatedCopies * model.replicated_bytes,
                                          .gathered_bytes = result.prefetches.pool_bytes()});
  return result;
}

std::string fit_text(const EtpPlan& plan, int64_t cap) {
  if (cap < 0) return "no cap";
  const std::string limit = bytes_text(cap);
  if (plan.prefetches.peak_bytes > cap)
    return fmt::format("does not fit below the cap of {}: one use takes {}", limit, bytes_text(plan.largest_use));
  if (plan.prefetches.on_demand == 0) return fmt::format("fits below the cap of {}", limit);
  return fmt::format("fits below the cap of {}, with {} on demand; {} would prefetch what the distances allow", limit,
                     count_text(plan.prefetches.on_demand, "use"), bytes_text(plan.uncapped_peak));
}

nlohmann::ordered_json plan_json(const EtpPlan& plan, int64_t cap) {
  nlohmann::ordered_json uses = nlohmann::ordered_json::array();
  for (const etp::PlannedUse& use : plan.prefetches.uses)
    uses.push_back({{"weight", plan.model.names[use.use.weight]},
                    {"phase", to_string(use.use.phase)},
                    {"plane", to_string(use.use.plane)},
                    {"micro_batch", use.use.micro_batch},
                    {"on_demand", use.on_demand},
                    {"prefetches", use.prefetches},
                    {"live_bytes", use.live_bytes}});
  nlohmann::ordered_json pools = nlohmann::ordered_json::array();
  for (const etp::KeyPeak& peak : plan.prefetches.forecast())
    pools.push_back(
        {{"key", to_string(plan.model.keys.key(peak.key))}, {"buffers", peak.buffers}, {"bytes", peak.bytes}});
  const etp::RuntimeForecast& bytes = plan.rank_bytes;
  return {{"at_start", plan.prefetches.at_start},
          {"uses", uses},
          {"pools", pools},
          {"on_demand", plan.prefetches.on_demand},
          {"wasted", plan.prefetches.wasted},
          {"peak_bytes", plan.prefetches.peak_bytes},
          {"peak_bytes_without_cap", plan.uncapped_peak},
          {"fits", cap < 0 || plan.prefetches.peak_bytes <= cap},
          {"rank_bytes",
           {{"parameters", bytes.parameters},
            {"gradients", bytes.gradients},
            {"publication", bytes.publication},
            {"replicated", bytes.replicated},
            {"gathered", bytes.gathered},
            {"gradients_in_flight", bytes.produced},
            {"total", bytes.total()}}}};
}

void print_uses(const EtpPlan& plan) {
  const auto name = [&](uint32_t use) {
    return tessera::quoted(plan.model.names[plan.prefetches.uses[use].use.weight]);
  };
  const auto names = [&](const std::vector<uint32_t>& uses) {
    std::vector<std::string> all;
    for (const uint32_t use : uses) all.push_back(name(use));
    return all.empty() ? std::string("-") : fmt::format("{}", fmt::join(all, ", "));
  };
  fmt::print("{:>5}  {:<9} {:<6} {:<9} {:>11}  {}\n", "use", "phase", "plane", "gathered", "live", "weight; meanwhile");
  fmt::print("{:>5}  {:<9} {:<6} {:<9} {:>11}  {}\n", "start", "", "", "", "", names(plan.prefetches.at_start));
  const size_t count = plan.prefetches.uses.size();
  for (uint32_t i = 0; i < std::min(count, kShownUses); ++i) {
    const etp::PlannedUse& use = plan.prefetches.uses[i];
    fmt::print("{:>5}  {:<9} {:<6} {:<9} {:>11}  {}; {}\n", i, to_string(use.use.phase), to_string(use.use.plane),
               use.on_demand ? "on demand" : "before", bytes_text(use.live_bytes), name(i), names(use.prefetches));
  }
  if (count > kShownUses) fmt::print("{:>5}  and {} more uses\n", "...", count - kShownUses);
}

void print_plan(const EtpPlan& plan, const EtpPlanArguments& arguments) {
  print_uses(plan);
  fmt::print("\n{:>11}  {:>7}  {}\n", "pool", "buffers", "of");
  std::vector<etp::KeyPeak> pools = plan.prefetches.forecast();
  std::ranges::stable_sort(pools, std::ranges::greater{}, &etp::KeyPeak::bytes);
  for (size_t i = 0; i < std::min(pools.size(), kShownUses); ++i)
    fmt::print("{:>11}  {:>7}  {}\n", bytes_text(pools[i].bytes), pools[i].buffers,
               to_string(plan.model.keys.key(pools[i].key)));
  if (pools.size() > kShownUses) fmt::print("{:>11}  and {} more pools\n", "...", pools.size() - kShownUses);

  const etp::RuntimeForecast& bytes = plan.rank_bytes;
  fmt::print("\n{} of {} sharded over {}, {} replicated\n", count_text(std::ssize(plan.model.names), "weight"),
             count_text(std::ssize(plan.model.names) + plan.model.replicated, "tensor"),
             count_text(arguments.sharding.ranks, "rank"), plan.model.replicated);
  fmt::print("gathered at once {} ({}), in pools {}\n", bytes_text(plan.prefetches.peak_bytes),
             fit_text(plan, arguments.cap_bytes), bytes_text(plan.prefetches.pool_bytes()));
  fmt::print(
      "rank 0 holds {}: parameters {}, gradients {}, publication {}, replicated {}, gathered {}, gradients in "
      "flight {}; and its optimiser's state\n",
      bytes_text(bytes.total()), bytes_text(bytes.parameters), bytes_text(bytes.gradients),
      bytes_text(bytes.publication), bytes_text(bytes.replicated), bytes_text(bytes.gathered),
      bytes_text(bytes.produced));
}

ExitStatus run_etp_plan(const EtpPlanArguments& arguments) {
  const EtpPlan plan = make_plan(arguments);
  if (arguments.json)
    fmt::print("{}\n", plan_json(plan, arguments.cap_bytes).dump());
  else
    print_plan(plan, arguments);
  return ExitStatus::kOk;
}

}  // namespace

void add_etp_plan_command(CLI::App& etp, Run& run) {
  CLI::App& command =
      *etp.add_subcommand("plan", "Which weights are gathered when, and how much memory that takes; without a run")
           ->footer(kEtpPlanExamples);
  const auto arguments = std::make_shared<EtpPlanArguments>();
  command.add_option("--model", arguments->model, "A list of weights, or a checkpoint, of which only headers are read")
      ->required();
  command.add_option("--group", arguments->sharding.ranks, "Ranks that each weight is cut over")->required();
  command.add_option("--distance", arguments->prefetch.distance, "Prefetch so many uses ahead (default: 1)");
  command.add_option("--expert-distance", arguments->prefetch.expert_distance,
                     "The same for stacks of experts (default: 2)");
  command.add_option("--cap", arguments->cap_bytes, "Most gathered bytes at once, such as 512MiB (default: no cap)")
      ->transform(CLI::AsSizeValue(false));
  add_list(command, "--format", arguments->formats,
           "What matching weights travel as: REGEX=FORMAT, repeatable (default: the list's, else the dtype)");
  command.add_option("--dtype", arguments->dtype,
                     "Element type of the GEMMs: bf16, f16 or f32 (default: the weight's)");
  command.add_option("--pad-for-alignment", arguments->sharding.pad_for_alignment,
                     "Rows that shards are aligned to, at least the format's; 0: no padding (default: 16)");
  command.add_option("--min-elements", arguments->sharding.min_elements,
                     "Smaller weights are replicated (default: 2048)");
  command.add_option("--micro-batches", arguments->micro_batches, "Of a step (default: 1)")
      ->check(whole_number("a number of micro-batches", 1024));
  command.add_flag("--recompute", arguments->recompute, "Backward runs each weight's forward again");
  command.add_flag("--forward-only", arguments->forward_only, "Without backward");
  command.add_flag("--json", arguments->json, "Print one JSON object");
  command.callback([arguments, &run] { run = [arguments](Interrupt&) { return run_etp_plan(*arguments); }; });
}

}  // namespace tessera::tools
