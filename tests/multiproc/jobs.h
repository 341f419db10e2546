// A trainer and an inference job of one float matrix, cut down to what a test wants to break.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tessera/bus.h"
#include "tests/harness.h"

namespace tessera::test {

struct Side {
  std::string job;
  std::string peer;
  Rank rank = 0;
  int world = 1;
  std::string layout;  // of "weight"
  Shape shape{64, 48};
  DType dtype = DType::kF32;
  std::string name = "weight";
  bool sends = false;
  Timeout rendezvous = std::chrono::seconds(8);
};

// Rows at the trainer's ranks, columns at the inference job's.
Side trainer(Rank rank, int world = 2);
Side inference(Rank rank, int world = 2);

// The local tensor of a side, zeroed.
std::vector<float> local_tensor(const Side& side);

// Joins the pair, registers the tensor and calls `body`.
int with_batch(const Side& side, const std::string& store,
               const std::function<int(Batch& batch, std::vector<float>& tensor)>& body);

}  // namespace tessera::test
