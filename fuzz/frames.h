// Feeds a stream to a FrameReader, in two pieces.
#pragma once

#include <sys/socket.h>

#include <algorithm>

#include "base/framing.h"
#include "base/socket.h"
#include "fuzz/targets.h"

namespace tessera::fuzz {

// Calls `take` with every frame of `stream`; `streams`: frames of any stream are accepted, with any check. Throws like
// FrameReader.
template <typename Take>
void read_frames(Input stream, uint32_t magic, FrameLimits limits, Take take, bool streams = false) {
  constexpr size_t kMostInFlight = 32 << 10;  // fits the socket's buffer
  const auto [ours, theirs] = socket_pair();
  const auto limits_of = [limits](uint32_t) { return limits; };
  FrameReader reader(magic, limits, streams ? FrameReader::LimitsOf(limits_of) : nullptr);
  if (streams) reader.take_checks();
  Frame frame;
  size_t piece = std::min(stream.size(), size_t{1} + stream.size() % 61);  // frames are cut at arbitrary places
  bool open = true;
  while (open) {
    if (stream.empty()) {
      ::shutdown(theirs.get(), SHUT_WR);
    } else {
      TESSERA_CHECK_EQ(send_some(theirs.get(), stream.first(piece)), piece);
      stream = stream.subspan(piece);
      piece = std::min(stream.size(), kMostInFlight);
    }
    open = reader.fill(ours.get());
    while (reader.next(frame)) take(frame);
  }
}

}  // namespace tessera::fuzz
