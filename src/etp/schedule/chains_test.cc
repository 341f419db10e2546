#include "etp/schedule/chains.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/testing.h"
#include "tessera/error.h"

namespace tessera::etp {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

GraphScope scope(std::vector<std::string> names, bool overlap = false) {
  return GraphScope::of(names, overlap);
}

TEST(Chains, FollowFromTheName) {
  struct Case {
    const char* name;
    std::vector<std::string> scope;
    bool overlap;
    Chain chain;
  };
  using enum Chain;
  const std::vector<std::string> all{"attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba"};
  for (const Case& c : std::vector<Case>{
           {"embedding.word_embeddings.weight", all, false, kUngraphed},
           {"a.embedding.self_attention.weight", all, false, kUngraphed},
           {"output_layer.weight", all, false, kUngraphed},
           {"decoder.layers.0.self_attention.linear_qkv.weight", {}, false, kUngraphed},
           {"decoder.layers.0.self_attention.linear_qkv.weight", {"attn"}, false, kGraphed},
           {"decoder.layers.0.cross_attention.linear_q.weight", {"attn"}, false, kGraphed},
           {"decoder.layers.0.self_attention.linear_qkv.weight", {"moe", "mamba"}, false, kUngraphed},
           {"self_attention.linear_qkv.weight", {"attn"}, false, kUngraphed},  // no dot before it
           {"decoder.layers.0.mlp.shared_experts.linear_fc1.weight", {"moe"}, false, kGraphed},
           {"decoder.layers.0.mlp.shared_experts.linear_fc1.weight", {"moe_router"}, false, kGraphed},
           {"decoder.layers.0.mlp.shared_experts.linear_fc1.weight", {"moe", "moe_router"}, true, kUngraphed},
           {"decoder.layers.0.mlp.shared_experts.linear_fc1.weight", {"attn"}, false, kUngraphed},
           {"decoder.layers.0.mlp.experts.linear_fc1.weight0", {"moe"}, false, kGraphed},
           {"decoder.layers.0.mlp.experts.linear_fc1.weight0", {"moe"}, true, kGraphed},
           {"decoder.layers.0.mlp.experts.linear_fc1.weight0", {"moe_router"}, false, kUngraphed},
           {"decoder.layers.0.mixer.in_proj.weight", {"mamba"}, false, kGraphed},
           {"decoder.layers.0.mixer.in_proj.weight", {"attn"}, false, kUngraphed},
           {"decoder.layers.0.mlp.linear_fc1.weight", all, false, kUngraphed},
           // The first rule wins.
           {"x.mlp.experts.self_attention.weight", {"attn"}, false, kUngraphed},
           {"x.self_attention.mixer.weight", {"mamba"}, false, kUngraphed},
       })
    EXPECT_EQ(chain_of(c.name, scope(c.scope, c.overlap)), c.chain)
        << c.name << " " << testing::PrintToString(c.scope) << " " << c.overlap;
}

TEST(Chains, AnUnknownScopeIsAnErrorThatListsThem) {
  EXPECT_THAT(error_of([] { scope({"attn", "atn"}); }),
              AllOf(HasSubstr("\"atn\""), HasSubstr("moe_router"), HasSubstr("did you mean attn")));
  EXPECT_TRUE(scope({}).empty());
  EXPECT_TRUE(scope({}, true).empty());
}

TEST(Chains, APlannedWeightKeepsItsChain) {
  std::vector<std::string> names;
  std::vector<std::optional<Chain>> planned;
  for (int i = 0; i < 6; ++i) {
    names.push_back("layers." + std::to_string(i) + ".self_attention.weight");
    planned.emplace_back(Chain::kUngraphed);
  }
  planned[0].reset();
  EXPECT_EQ(classify_chains(names, {}, planned), std::vector(6, Chain::kUngraphed));
  const std::string five = error_of([&] { classify_chains(names, scope({"attn"}), planned); });
  EXPECT_THAT(five, AllOf(Not(HasSubstr("layers.0.")), HasSubstr("layers.1."), HasSubstr("layers.2."),
                          HasSubstr("\"layers.3.self_attention.weight\" from UNGRAPHED to GRAPHED, ..."),
                          Not(HasSubstr("layers.4."))));
  planned[4].reset();
  planned[5] = Chain::kGraphed;
  const std::string three = error_of([&] { classify_chains(names, scope({"attn"}), planned); });
  EXPECT_THAT(three, AllOf(HasSubstr("layers.3."), Not(HasSubstr("..."))));
}

TEST(Chains, EmbeddingsExpectNoBackwardGather) {
  EXPECT_FALSE(expects_backward_gather("model.embedding.weight"));
  EXPECT_TRUE(expects_backward_gather("output_layer.weight"));
}

}  // namespace
}  // namespace tessera::etp
