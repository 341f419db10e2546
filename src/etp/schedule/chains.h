// Chains: weights that CUDA graphs capture, and those that run outside of them. A prefetch never crosses from one chain
// to the other. Which chain a weight is in follows from its dotted name. Pure functions; thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::etp {

enum class Chain : uint8_t { kGraphed, kUngraphed };
inline constexpr int kChains = 2;
std::string_view to_string(Chain chain);  // "GRAPHED", "UNGRAPHED"
// Throws Error(kInvalidArgument) for another name.
Chain parse_chain(std::string_view name);

// What CUDA graphs capture, by Megatron's names; by default nothing.
struct GraphScope {
  bool attn = false;
  bool mlp = false;
  bool moe = false;
  bool moe_router = false;
  bool moe_preprocess = false;
  bool mamba = false;
  bool shared_expert_overlap = false;  // shared experts run beside the others, on a stream of their own

  // Throws Error(kInvalidArgument) that lists the names for one that is unknown.
  static GraphScope of(std::span<const std::string> names, bool shared_expert_overlap);
  bool empty() const { return !(attn || mlp || moe || moe_router || moe_preprocess || mamba); }
  friend bool operator==(const GraphScope&, const GraphScope&) = default;
};

// By the first rule that applies:
//   contains "embedding" or "output_layer"          ungraphed
//   the scope is empty                              ungraphed
//   contains ".mlp.shared_experts."                 graphed if not overlapped and the scope has moe or moe_router
//   contains ".mlp.experts."                        graphed if the scope has moe
//   contains ".self_attention.", ".cross_attention." graphed if the scope has attn
//   contains ".mixer."                              graphed if the scope has mamba
//   else                                            ungraphed
Chain chain_of(std::string_view name, const GraphScope& scope);

// Of all weights. `planned`: where each is planned already, if it is; same length. Throws Error(kInvalidArgument) that
// lists the first three weights that would change chains, then "...".
std::vector<Chain> classify_chains(std::span<const std::string> names, const GraphScope& scope,
                                   std::span<const std::optional<Chain>> planned);

// Whether a backward gather is expected of a weight with this name: not of embeddings. Only a guess before the first
// step: the uses themselves decide.
bool expects_backward_gather(std::string_view name);

}  // namespace tessera::etp
