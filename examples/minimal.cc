// Two programs in one file: a trainer of two ranks that holds a matrix by rows, and a separately started inference job
// of two ranks that takes each new version by columns.
//
//   minimal trainer 0 & minimal trainer 1 & minimal inference 0 & minimal inference 1
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "tessera/bus.h"
#include "tessera/memory.h"

namespace {

using tessera::Layout;

constexpr int64_t kRows = 6, kColumns = 8, kVersions = 3;

// --- job "trainer": rows 0-2 on rank 0, rows 3-5 on rank 1
// ------------------------------------------------------------
void train(int rank) {
  tessera::Bus bus({.job = "trainer", .rank = rank, .world = 2});
  tessera::Pair pair = bus.pair({.name = "weights", .peer = "inference"});

  const int64_t elements = kRows / 2 * kColumns;
  tessera::SharedBuffer memory = tessera::SharedHeap::process().allocate(elements * sizeof(float));
  auto* weight = reinterpret_cast<float*>(memory.data());
  const tessera::TensorSpec tensor{.name = "weight",
                                   .data = weight,
                                   .dtype = tessera::DType::kF32,
                                   .shape = {kRows, kColumns},
                                   .layout = Layout::parse("fsdp=2:S0")};
  tessera::Batch batch = pair.offer("policy", {&tensor, 1});

  for (int64_t version = 1; version <= kVersions; ++version) {
    for (int64_t i = 0; i < elements; ++i) {  // "an optimiser step": element (r, c) becomes 100 * version + 10 * r + c
      const int64_t row = rank * kRows / 2 + i / kColumns;
      weight[i] = static_cast<float>(100 * version + 10 * row + i % kColumns);
    }
    batch.send(version).wait();  // done when both inference ranks have it; the memory is ours again
  }
}

// --- job "inference": columns 0-3 on rank 0, columns 4-7 on rank 1
// ----------------------------------------------------
int serve(int rank) {
  tessera::Bus bus({.job = "inference", .rank = rank, .world = 2});
  tessera::Pair pair = bus.pair({.name = "weights", .peer = "trainer"});

  std::vector<float> weight(kRows * kColumns / 2);  // any memory will do
  const tessera::TensorSpec tensor{.name = "weight",
                                   .data = weight.data(),
                                   .dtype = tessera::DType::kF32,
                                   .shape = {kRows, kColumns},
                                   .layout = Layout::parse("tp=2:S1")};
  tessera::Batch batch = pair.accept("policy", {&tensor, 1});

  int wrong = 0;
  while (batch.version() < kVersions) {
    const int64_t version = batch.recv().wait();
    for (int64_t i = 0; i < kRows * kColumns / 2; ++i) {
      const int64_t row = i / (kColumns / 2), column = rank * kColumns / 2 + i % (kColumns / 2);
      wrong += weight[static_cast<size_t>(i)] != static_cast<float>(100 * version + 10 * row + column);
    }
    std::printf("inference/%d holds version %ld, %d elements wrong\n", rank, static_cast<long>(version), wrong);
  }
  return wrong == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string_view job = argc > 2 ? argv[1] : "";
  if (job == "trainer") return train(std::atoi(argv[2])), 0;
  if (job == "inference") return serve(std::atoi(argv[2]));
  std::fprintf(stderr, "usage: minimal trainer|inference RANK\n");
  return 2;
} catch (const tessera::Error& error) {
  std::fprintf(stderr, "minimal: %s\n", error.what());
  return 1;
}
