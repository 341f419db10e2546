#include "etp/schedule/chains.h"

#include <algorithm>
#include <array>

#include "base/fail.h"
#include "base/nearest.h"
#include "layout/text_reader.h"

namespace tessera::etp {
namespace {

constexpr std::array<std::pair<std::string_view, bool GraphScope::*>, 6> kScopes{{
    {"attn", &GraphScope::attn},
    {"mlp", &GraphScope::mlp},
    {"moe", &GraphScope::moe},
    {"moe_router", &GraphScope::moe_router},
    {"moe_preprocess", &GraphScope::moe_preprocess},
    {"mamba", &GraphScope::mamba},
}};

constexpr size_t kShownConflicts = 3;

bool is_graphed(std::string_view name, const GraphScope& scope) {
  const auto has = [name](std::string_view part) { return name.find(part) != std::string_view::npos; };
  if (has("embedding") || has("output_layer") || scope.empty()) return false;
  if (has(".mlp.shared_experts.")) return !scope.shared_expert_overlap && (scope.moe || scope.moe_router);
  if (has(".mlp.experts.")) return scope.moe;
  if (has(".self_attention.") || has(".cross_attention.")) return scope.attn;
  return has(".mixer.") && scope.mamba;
}

}  // namespace

std::string_view to_string(Chain chain) {
  return chain == Chain::kGraphed ? "GRAPHED" : "UNGRAPHED";
}

Chain parse_chain(std::string_view name) {
  for (const Chain chain : {Chain::kGraphed, Chain::kUngraphed})
    if (name == to_string(chain)) return chain;
  fail(ErrorCode::kInvalidArgument, "there is no chain {}: there are GRAPHED and UNGRAPHED"_message,
       tessera::quoted(name));
}

GraphScope GraphScope::of(std::span<const std::string> names, bool shared_expert_overlap) {
  GraphScope scope{.shared_expert_overlap = shared_expert_overlap};
  std::vector<std::string_view> known;
  for (const auto& [name, member] : kScopes) known.push_back(name);
  for (const std::string& name : names) {
    const auto found = std::ranges::find(known, std::string_view(name));
    if (found == known.end())
      fail(ErrorCode::kInvalidArgument, "unknown CUDA graph scope {}: there are {}{}"_message, tessera::quoted(name),
           fmt::join(known, ", "), did_you_mean(name, known));
    scope.*kScopes.at(static_cast<size_t>(found - known.begin())).second = true;
  }
  return scope;
}

Chain chain_of(std::string_view name, const GraphScope& scope) {
  return is_graphed(name, scope) ? Chain::kGraphed : Chain::kUngraphed;
}

std::vector<Chain> classify_chains(std::span<const std::string> names, const GraphScope& scope,
                                   std::span<const std::optional<Chain>> planned) {
  TESSERA_CHECK_EQ(names.size(), planned.size());
  std::vector<Chain> chains;
  std::vector<std::string> conflicts;
  for (size_t i = 0; i < names.size(); ++i) {
    chains.push_back(chain_of(names[i], scope));
    if (!planned[i] || *planned[i] == chains.back() || conflicts.size() > kShownConflicts) continue;
    conflicts.push_back(conflicts.size() == kShownConflicts
                            ? "..."
                            : fmt::format("{} from {} to {}", tessera::quoted(names[i]), to_string(*planned[i]),
                                          to_string(chains.back())));
  }
  if (!conflicts.empty())
    fail(ErrorCode::kInvalidArgument,
         "weights that are planned already would change chains: {}; set the scope of CUDA graphs before the first "
         "step"_message,
         fmt::join(conflicts, ", "));
  return chains;
}

bool expects_backward_gather(std::string_view name) {
  return name.find("embedding") == std::string_view::npos;
}

}  // namespace tessera::etp
