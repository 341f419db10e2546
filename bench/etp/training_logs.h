// Schedule logs as training gives them, of any length.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "device/record/logs_testing.h"

namespace tessera::device {

// Four ranks with three streams each train layer by layer: publish, gather from all ranks, GEMM, fold, retire, with the
// events and words that this takes.
class TrainingLogs {
 public:
  TrainingLogs() : logs_(kRanks) {
    for (int rank = 0; rank < kRanks; ++rank)
      streams_.push_back({logs_.stream(rank, "publish"), logs_.stream(rank, "gather"), logs_.stream(rank, "compute")});
  }

  // Appends whole steps until there are so many records.
  std::vector<RankLog>& with(size_t records) {
    for (uint64_t version = 1; count() < records; ++version)
      for (int rank = 0; rank < kRanks; ++rank) step(rank, version);
    return logs_.all();
  }

 private:
  static constexpr int kRanks = 4;
  static constexpr uint64_t kLayers = 32;
  static constexpr uint64_t kRowsBytes = 4096;                   // of a layer, on each rank
  static constexpr uint64_t kGatheredAt = kLayers * kRowsBytes;  // two buffers of whole layers, in turns
  static constexpr uint64_t kLayerBytes = kRanks * kRowsBytes;

  struct Streams {
    HandLogs::Actor publish, gather, compute;
  };

  size_t count() {
    size_t records = 0;
    for (const RankLog& log : logs_.all()) records += log.records().size();
    return records;
  }

  static WordEdge published(int rank, uint64_t layer, uint64_t version) { return {rank, layer, version}; }
  static WordEdge retired(int rank, uint64_t version) { return {rank, kLayers, version}; }

  void step(int rank, uint64_t version) {
    const Streams& s = streams_[static_cast<size_t>(rank)];
    for (int peer = 0; peer < kRanks && version > 1; ++peer) logs_.see(rank, retired(peer, version - 1));
    for (uint64_t layer = 0; layer < kLayers; ++layer)
      logs_.operation(s.publish, "publish", {writes(rank, layer * kRowsBytes, (layer + 1) * kRowsBytes, version)}, {},
                      {published(rank, layer, version)});
    std::array<uint64_t, 2> used{};
    for (uint64_t layer = 0; layer < kLayers; ++layer) {
      const uint64_t buffer = kGatheredAt + layer % 2 * kLayerBytes;
      if (used[layer % 2] != 0) logs_.wait(s.gather, used[layer % 2]);
      for (int i = 0; i < kRanks; ++i) {
        const int owner = (rank + i) % kRanks;
        const uint64_t at = buffer + static_cast<uint64_t>(owner) * kRowsBytes;
        logs_.operation(s.gather, "gather",
                        {reads(owner, layer * kRowsBytes, (layer + 1) * kRowsBytes, version),
                         writes(rank, at, at + kRowsBytes, version)},
                        {published(owner, layer, version)});
      }
      logs_.wait(s.compute, logs_.record(s.gather));
      logs_.operation(s.compute, "gemm", {reads(rank, buffer, buffer + kLayerBytes, version)});
      used[layer % 2] = logs_.record(s.compute);
    }
    logs_.wait(HandLogs::host(rank), used[(kLayers - 1) % 2]);
    logs_.set(rank, retired(rank, version).word, version);
  }

  HandLogs logs_;
  std::vector<Streams> streams_;
};

}  // namespace tessera::device
