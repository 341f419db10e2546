#include "transport/shm/pull_cost.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

#include "base/clock.h"
#include "codec/simd/stream.h"
#include "transport/shm/remote_read.h"

namespace tessera {
namespace {

constexpr size_t kBytes = size_t{4} << 20;
constexpr size_t kPiece = 1024;
constexpr size_t kPieces = kBytes / kPiece;
constexpr size_t kRequest = size_t{256} << 10;  // size of one get, and of the bounced data
constexpr int kRounds = 3;

struct Samples {
  std::vector<std::byte> src = std::vector<std::byte>(2 * kBytes, std::byte{1});
  std::vector<std::byte> dst = std::vector<std::byte>(kBytes, std::byte{2});
  std::vector<std::byte> staging = std::vector<std::byte>(kRequest);
};

double fastest(const std::function<void()>& body) {
  Duration best = Duration::max();
  for (int round = 0; round < kRounds; ++round) {
    const TimePoint begin = Clock::steady().now();
    body();
    best = std::min(best, Clock::steady().now() - begin);
  }
  return to_seconds(best);
}

// Reads kBytes in runs of `piece` bytes, `stride` apart.
double readv_seconds(Samples& samples, size_t piece, size_t stride) {
  return fastest([&] {
    RemoteReader reader(::getpid());
    for (size_t done = 0; done < kBytes; done += piece) {
      const auto address = reinterpret_cast<uintptr_t>(samples.src.data() + done / piece * stride);
      if (!reader.add(address, samples.dst.data() + done, piece).ok()) return;
      if ((done + piece) % kRequest == 0 && !reader.flush().ok()) return;
    }
  });
}

double ring_seconds(Samples& samples, size_t piece, size_t stride) {
  return fastest([&] {
    for (size_t done = 0; done < kBytes; done += kRequest) {
      for (size_t at = 0; at < kRequest; at += piece)
        std::memcpy(samples.staging.data() + at, samples.src.data() + (done + at) / piece * stride, piece);
      copy_stream(samples.dst.data() + done, samples.staging.data(), kRequest);
    }
    stream_fence();
  });
}

PathCost cost_of(double contiguous, double in_pieces) {
  return {.byte = contiguous / static_cast<double>(kBytes),
          .piece = std::max(in_pieces - contiguous, 0.0) / static_cast<double>(kPieces)};
}

}  // namespace

PullCosts measure_pull_costs() {
  Samples samples;
  PullCosts costs;
  costs.ring = cost_of(ring_seconds(samples, kRequest, kRequest), ring_seconds(samples, kPiece, 2 * kPiece));
  if (!probe_remote_read(::getpid()).ok()) return costs;
  costs.readv = cost_of(readv_seconds(samples, kRequest, kRequest), readv_seconds(samples, kPiece, 2 * kPiece));
  return costs;
}

const PullCosts& pull_costs() {
  static const PullCosts costs = measure_pull_costs();
  return costs;
}

}  // namespace tessera
