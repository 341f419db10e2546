// What this rank holds of one source, and which routes of a pull travel as deltas to it. On the loop's thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "bus/registration/batch_routes.h"
#include "bus/session/versions.h"
#include "peer/exchange/pull_end.h"

namespace tessera::bus {

class PullDeltas {
 public:
  explicit PullDeltas(const PullEnd& exchange);

  // The version that the destination holds of the source, whole and untouched; 0: none that is known.
  Stamp held() const { return held_; }
  // Memory for the next Grant, and for a Grant that is no longer needed.
  Grant room() { return {.deltas = std::move(granted_)}; }
  void give_back(Grant grant) { granted_ = std::move(grant.deltas); }

  // Begins the pull that `grant` allows. Nothing is held until complete(). Throws Error(kMismatch) for invalid deltas.
  // REQUIRES: the exchange is ready
  void begin(Grant grant);
  void complete() { held_ = stamp_; }
  // How its routes travel, by position in the program, for PullRun::travel(). Empty if the connection has no deltas:
  // then all travel in full.
  std::span<const Travel> travel() const { return travel_; }
  std::span<const int64_t> bytes_of_deltas() const { return bytes_; }
  Travel travel_of(size_t position) const { return travel_.empty() ? Travel::kFull : travel_[position]; }
  // The route has arrived: it does not travel again in this pull.
  void arrived(size_t position);
  // The route travels in full after all.
  void give_up(size_t position);
  // So do all routes that a stream carries: its source packs everything once more.
  void give_up_streamed();
  // What travelled as deltas, and the size that it stands for.
  const DeltaBytes& read() const { return read_; }

 private:
  const PullEnd& exchange_;
  Stamp held_ = 0;
  Stamp stamp_ = 0;  // of the last Grant
  DeltaBytes read_;
  std::vector<int64_t> granted_;  // by the last Grant: bytes for each route of the connection
  std::vector<Travel> travel_;
  std::vector<int64_t> bytes_;
};

}  // namespace tessera::bus
