// Layouts like those of training and serving jobs, with 64 to 1,024 ranks and the tensors of a transformer: forty kinds
// that the balance tests and the benchmark share.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "tessera/plan.h"

namespace tessera::plan {

struct Relayout {
  std::string name;
  TensorMeta meta;
  Layout src;
  Layout dst;
};

// Placements of the tensors below, in the same order, on one mesh.
struct LayoutSide {
  const char* mesh;  // "dp=2,tp=4@0-7"
  std::array<const char*, 5> placements;
};

struct Scenario {
  const char* name;
  LayoutSide src;
  LayoutSide dst;
};

inline std::vector<Relayout> realistic_relayouts() {
  struct Weight {
    const char* name;
    Shape shape;
  };
  const std::array<Weight, 5> weights{{{"embedding", {128256, 4096}},
                                       {"columns", {6144, 4096}},
                                       {"rows", {4096, 14336}},
                                       {"norm", {4096}},
                                       {"experts", {128, 3072, 4096}}}};
  const std::vector<Scenario> scenarios{
      {"fsdp to tp on the same 64 ranks",
       {"fsdp=64@0-63", {"S0", "S0", "S0", "S0", "S0"}},
       {"dp=8,tp=8@0-63", {"R,S0", "R,S0", "R,S1", "R,R", "R,S0"}}},
      {"hsdp 8x128 to tp 8",
       {"dp=8,fsdp=128@0-1023", {"R,S0", "R,S0", "R,S0", "R,S0", "R,S0"}},
       {"dp=16,tp=8@1024-1151", {"R,S0", "R,S0", "R,S1", "R,R", "R,S0"}}},
      {"tp 8 to tp 4, 32 replicas to 2",
       {"dp=32,tp=8@0-255", {"R,S0", "R,S0", "R,S1", "R,R", "R,S1"}},
       {"dp=2,tp=4@256-263", {"R,S0", "R,S0", "R,S1", "R,R", "R,S0"}}},
      {"fsdp over tp, strided, to tp 16",
       {"fsdp=16,tp=8@0-127", {"S0*8,S0", "S0*8,S0", "S0,S1", "S0,R", "S0,S0"}},
       {"dp=4,tp=16@128-191", {"R,S0", "R,S0", "R,S1", "R,R", "R,S0"}}},
      {"experts: ep 64 to ep 16 x tp 4",
       {"dp=4,ep=64@0-255", {"S0,S0", "S0,S0", "S0,S0", "R,S0", "R,S0"}},
       {"ep=16,tp=4@256-319", {"R,S0", "R,S0", "R,S1", "R,R", "S0,S1"}}},
      {"3 replicas to 4 shards",
       {"dp=3,fsdp=32@0-95", {"R,S0", "R,S0", "R,S0", "R,S0", "R,S0"}},
       {"tp=128@96-223", {"S0", "S0", "S1", "R", "S0"}}},
      {"fsdp 1024 to 64 replicas of tp 16",
       {"fsdp=1024@0-1023", {"S0", "S0", "S0", "S0", "S0"}},
       {"dp=64,tp=16@1024-2047", {"R,S0", "R,S0", "R,S1", "R,R", "R,S0"}}},
      {"hsdp over tp, strided, 1024 to 1024",
       {"dp=16,fsdp=8,tp=8@0-1023", {"R,S0*8,S0", "R,S0*8,S0", "R,S0,S1", "R,S0,R", "R,S0,S0"}},
       {"dp=64,tp=16@1024-2047", {"R,S0", "R,S0", "R,S1", "R,R", "R,S1"}}}};

  std::vector<Relayout> relayouts;
  for (const Scenario& scenario : scenarios) {
    for (size_t i = 0; i < weights.size(); ++i) {
      const auto layout = [i](const LayoutSide& side) {
        return Layout::parse(std::string(side.mesh) + ":" + side.placements[i]);
      };
      relayouts.push_back({std::string(scenario.name) + ", " + weights[i].name,
                           {weights[i].shape, DType::kBF16},
                           layout(scenario.src),
                           layout(scenario.dst)});
    }
  }
  return relayouts;
}

}  // namespace tessera::plan
