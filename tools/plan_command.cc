#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "base/fail.h"
#include "layout/text_reader.h"
#include "plan/text.h"
#include "tessera/checkpoint.h"
#include "tessera/plan.h"
#include "tools/commands.h"
#include "tools/interrupt.h"
#include "tools/layout_rules.h"
#include "tools/list_option.h"

namespace tessera::tools {
namespace {

using plan::bytes_text;
using plan::ratio_text;

constexpr char kPlanExamples[] = R"(Examples:
  One tensor; source and destination ranks share one numbering:
    tessera plan --shape 4096x4096 --dtype bf16 --src 'dp=2,fsdp=4@0-7:R,S0' --dst 'tp=4@8-11:S1' --svg plan.svg

  A whole model, by rules REGEX=LAYOUT (the first that matches a tensor's whole name wins):
    tessera plan --checkpoint model.safetensors --src '.*=fsdp=4:S0' \
      --dst '.*norm.*=tp=2@4-5:R' --dst '.*=tp=2@4-5:S1'

A layout is AXES@RANKS:PLACEMENTS: axes NAME=SIZE or SIZE, ranks 0-3 or 0,2,4-6 or left out, placements R (replicate),
S0 (shard dim 0), S0*2 (strided), G0[0;16;32] (ragged), Psum, Pavg, Pmin, Pmax, Pproduct.)";

constexpr size_t kRows = 40;  // of the model's table

struct PlanArguments {
  std::string shape;
  std::string dtype;
  std::string checkpoint;
  std::vector<std::string> src;
  std::vector<std::string> dst;
  std::string hosts;
  std::string svg;
  bool json = false;
};

// "0-7;8-15": the ranks of each host.
std::vector<std::vector<Rank>> parse_hosts(const std::string& text) {
  constexpr Index kHighest = (1 << 30) - 1;
  Index listed = 0;
  std::vector<std::vector<Rank>> hosts;
  if (text.empty()) return hosts;
  TextReader reader("hosts", text);
  do {
    auto& host = hosts.emplace_back();
    do {
      const Index first = reader.number(0, kHighest, "a rank");
      const Index last = reader.accept("-") ? reader.number(first, kHighest, "a rank no lower than the first") : first;
      if (last - first >= kMaxRanks - listed) reader.fail_expected(fmt::format("at most {} ranks in all", kMaxRanks));
      listed += last - first + 1;
      for (Index rank = first; rank <= last; ++rank) host.push_back(static_cast<Rank>(rank));
    } while (reader.accept(","));
  } while (reader.accept(";"));
  reader.expect_end("\"-\", \",\" and more ranks, or \";\" and the next host");
  return hosts;
}

void write_text(const std::string& path, const std::string& text) {
  errno = 0;
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  if (!file) fail_errno("cannot write " + path);
}

// --- one tensor ----------------------------------------------------------------------------------

void plan_tensor(const PlanArguments& arguments) {
  if (arguments.src.size() != 1 || arguments.dst.size() != 1)
    fail(ErrorCode::kInvalidArgument, "--shape takes one --src and one --dst, each a layout; got {} and {}"_message,
         arguments.src.size(), arguments.dst.size());
  if (arguments.dtype.empty()) fail(ErrorCode::kInvalidArgument, "--shape needs --dtype"_message);
  const TensorMeta meta{parse_shape(arguments.shape), parse_dtype(arguments.dtype)};
  const Plan plan = redistribute(meta, Layout::parse(arguments.src[0]), Layout::parse(arguments.dst[0]),
                                 {.hosts = parse_hosts(arguments.hosts)});
  if (!arguments.svg.empty()) write_text(arguments.svg, plan.to_svg());
  fmt::print("{}", arguments.json ? plan.to_json() + "\n" : explain(plan));
}

// --- a whole model -------------------------------------------------------------------------------

struct Model {
  std::vector<TensorInfo> tensors;
  std::vector<Layout> src;
  std::vector<Layout> dst;
  BatchPlanner planner;
};

Model plan_model(const PlanArguments& arguments) {
  if (!arguments.dtype.empty())
    fail(ErrorCode::kInvalidArgument, "--dtype goes with --shape: a checkpoint has its own"_message);
  const Checkpoint checkpoint = Checkpoint::open(arguments.checkpoint);
  Model model{{checkpoint.tensors().begin(), checkpoint.tensors().end()},
              LayoutRules::parse(arguments.src).assign(checkpoint.tensors()),
              LayoutRules::parse(arguments.dst).assign(checkpoint.tensors()),
              BatchPlanner({.hosts = parse_hosts(arguments.hosts)})};
  for (size_t i = 0; i < model.tensors.size(); ++i) {
    const TensorInfo& tensor = model.tensors[i];
    try {
      model.planner.add({tensor.shape, tensor.dtype}, model.src[i], model.dst[i]);
    } catch (const Error& error) {
      fail(error.code(), "tensor {}: {}"_message, tessera::quoted(tensor.name), error.what());
    }
  }
  return model;
}

nlohmann::ordered_json model_json(const Model& model) {
  nlohmann::ordered_json tensors = nlohmann::ordered_json::array();
  for (size_t i = 0; i < model.tensors.size(); ++i) {
    const TensorInfo& tensor = model.tensors[i];
    const Plan plan = model.planner.plan(static_cast<uint32_t>(i));
    tensors.push_back({{"name", tensor.name},
                       {"shape", tensor.shape},
                       {"dtype", to_string(tensor.dtype)},
                       {"src", model.src[i].to_string()},
                       {"dst", model.dst[i].to_string()},
                       {"routes", plan.stats.routes},
                       {"bytes_moved", plan.stats.bytes_moved}});
  }
  nlohmann::ordered_json egress = nlohmann::ordered_json::array();
  for (const auto& [rank, bytes] : model.planner.egress()) egress.push_back({{"rank", rank}, {"bytes", bytes}});
  const PlanStats stats = model.planner.stats();
  return {{"tensors", tensors},
          {"kinds", model.planner.kinds()},
          {"egress", egress},
          {"stats",
           {{"bytes_delivered", stats.bytes_delivered},
            {"bytes_moved", stats.bytes_moved},
            {"bytes_lower_bound", stats.bytes_lower_bound},
            {"max_egress", stats.max_egress},
            {"max_egress_lower_bound", stats.max_egress_lower_bound},
            {"bytes_between_hosts", stats.bytes_between_hosts},
            {"reduction_bytes", stats.reduction_bytes},
            {"routes", stats.routes}}}};
}

// A row for all tensors of one shape, dtype and pair of layouts.
void print_model(const Model& model) {
  struct Row {
    int64_t tensors = 0;
    size_t first = 0;
    int64_t bytes_moved = 0;
  };
  std::map<std::tuple<Shape, DType, std::string, std::string>, Row> kinds;
  for (size_t i = 0; i < model.tensors.size(); ++i) {
    const TensorInfo& tensor = model.tensors[i];
    Row& row = kinds[{tensor.shape, tensor.dtype, model.src[i].to_string(), model.dst[i].to_string()}];
    if (row.tensors++ == 0) {
      row.first = i;
      row.bytes_moved = model.planner.plan(static_cast<uint32_t>(i)).stats.bytes_moved;
    }
  }
  std::vector<Row> rows;
  rows.reserve(kinds.size());
  for (const auto& [kind, row] : kinds) rows.push_back(row);
  std::ranges::sort(rows, std::ranges::greater{}, [](const Row& row) { return row.tensors * row.bytes_moved; });

  fmt::print("{:>7}  {:<14} {:<8} {:>11}  {}\n", "tensors", "shape", "dtype", "moved",
             "from -> to (the first of them)");
  for (size_t i = 0; i < std::min(rows.size(), kRows); ++i) {
    const TensorInfo& tensor = model.tensors[rows[i].first];
    fmt::print("{:>7}  {:<14} {:<8} {:>11}  {} -> {} ({})\n", rows[i].tensors, to_string_shape(tensor.shape),
               to_string(tensor.dtype), bytes_text(rows[i].tensors * rows[i].bytes_moved),
               model.src[rows[i].first].to_string(), model.dst[rows[i].first].to_string(),
               tessera::quoted(tensor.name));
  }
  if (rows.size() > kRows) fmt::print("{:>7}  and {} more kinds\n", "...", rows.size() - kRows);

  fmt::print("\n{:>7}  {:<14} {:>12}\n", "rank", "sends", "of the most");
  const PlanStats stats = model.planner.stats();
  const auto egress = model.planner.egress();
  for (size_t i = 0; i < std::min(egress.size(), kRows); ++i)
    fmt::print("{:>7}  {:<14} {:>12}\n", egress[i].first, bytes_text(egress[i].second),
               ratio_text(egress[i].second, stats.max_egress));
  if (egress.size() > kRows) fmt::print("{:>7}  and {} more ranks\n", "...", egress.size() - kRows);

  fmt::print("\n{} tensors of {} kinds, {} routes\n", model.tensors.size(), model.planner.kinds(), stats.routes);
  fmt::print("moved          {} (lower bound {})\n", bytes_text(stats.bytes_moved),
             bytes_text(stats.bytes_lower_bound));
  if (stats.bytes_between_hosts > 0) fmt::print("between hosts  {}\n", bytes_text(stats.bytes_between_hosts));
  if (stats.reduction_bytes > 0) fmt::print("reduction      {}\n", bytes_text(stats.reduction_bytes));
  fmt::print("busiest source {}, at least {} must (imbalance {})\n", bytes_text(stats.max_egress),
             bytes_text(stats.max_egress_lower_bound), ratio_text(stats.max_egress, stats.max_egress_lower_bound));
}

// For a model, draws the tensor that moves the most bytes.
void draw_largest(const Model& model, const std::string& path) {
  std::optional<Plan> largest;
  for (uint32_t i = 0; i < model.planner.size(); ++i) {
    Plan plan = model.planner.plan(i);
    if (!largest || plan.stats.bytes_moved > largest->stats.bytes_moved) largest = std::move(plan);
  }
  if (!largest) fail(ErrorCode::kInvalidArgument, "--svg: the checkpoint has no tensor to draw"_message);
  write_text(path, largest->to_svg());
}

ExitStatus run_plan(const PlanArguments& arguments) {
  if (arguments.shape.empty() == arguments.checkpoint.empty())
    fail(ErrorCode::kInvalidArgument,
         "plan takes either --shape, for one tensor, or --checkpoint, for a model"_message);
  if (arguments.checkpoint.empty()) {
    plan_tensor(arguments);
    return ExitStatus::kOk;
  }
  const Model model = plan_model(arguments);
  if (!arguments.svg.empty()) draw_largest(model, arguments.svg);
  if (arguments.json)
    fmt::print("{}\n", model_json(model).dump());
  else
    print_model(model);
  return ExitStatus::kOk;
}

}  // namespace

void add_plan_command(CLI::App& app, Run& run) {
  CLI::App& command =
      *app.add_subcommand("plan", "Explain and draw which rank would send what to whom")->footer(kPlanExamples);
  const auto arguments = std::make_shared<PlanArguments>();
  command.add_option("--shape", arguments->shape, "One tensor: 4096x4096, or scalar");
  command.add_option("--dtype", arguments->dtype, "Its element type: f32, bf16, f8_e4m3, i64, ...");
  command.add_option("--checkpoint", arguments->checkpoint,
                     "A whole model: a .safetensors file, an index of several, or a folder with either");
  add_list(command, "--src", arguments->src, "Layout of the sources; with --checkpoint REGEX=LAYOUT, repeatable")
      ->required();
  add_list(command, "--dst", arguments->dst, "Layout of the destinations, in the same form")->required();
  command.add_option("--hosts", arguments->hosts, "Ranks of each host, as in '0-7;8-15' (default: one host)");
  command.add_option("--svg", arguments->svg,
                     "Draw the plan into this file (of a model, that of the tensor with most bytes to move)");
  command.add_flag("--json", arguments->json, "Print JSON, as docs/formats/plan-json.md describes it");
  command.callback([arguments, &run] { run = [arguments](Interrupt&) { return run_plan(*arguments); }; });
}

}  // namespace tessera::tools
