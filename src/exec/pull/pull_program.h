// What a PullProgram is made of. For pull*.cc only.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "exec/delta/delta_reader.h"
#include "exec/digests.h"
#include "exec/pull/compiler.h"
#include "exec/pull/stream_cursor.h"
#include "exec/units.h"
#include "exec/walk/copy_block.h"
#include "exec/walk/walk.h"
#include "exec/wire/wire_reader.h"

namespace tessera {

// One route, ready to run. Which walks are there depends on its path:
//   mapped, direct get   `walk` goes from the source array to the destination
//   get                  `remote` goes from the source array into packed staging, `walk` from there to the destination
//   stream               `walk` goes from the packed frame to the destination
struct PullPart {
  uint32_t route = 0;
  uint32_t tensor = 0;
  int64_t elements_per_atom = 1;
  BlockKernel kernel;
  Walk walk{};
  Walk remote{};
  ImageRange image{};
  const std::byte* mapped = nullptr;  // mapped: first element of the source
  uint32_t key = 0;                   // get: RemoteRegion::key
  int64_t origin = 0;                 // get: of the first element, in that region
  std::byte* data = nullptr;          // first element of the destination
  bool direct = false;                // get: straight into the destination
};

// Where bytes lie that are read as they are.
struct Bytes {
  Access access = Access::kMap;
  const std::byte* mapped = nullptr;  // map
  uint32_t key = 0;                   // get: RemoteRegion::key
  uint64_t origin = 0;                // get: of the first byte, in that region
};

// A route that travels quantised.
struct WirePart {
  uint32_t route = 0;
  Bytes piece;
  std::unique_ptr<const WireReader> reader;
};

// One that may travel as a delta.
struct DeltaPart {
  uint32_t route = 0;
  Bytes piece;
  DeltaReader reader;
};

// A route in the stream.
struct StreamPart {
  static constexpr uint32_t kNone = UINT32_MAX;
  uint32_t route = 0;
  uint32_t plain = kNone;  // in PullProgram::Impl::streamed; else it is a wire piece
  uint32_t wire = kNone;
  uint32_t delta = kNone;  // in ::delta, if it may travel as one
  int64_t bytes = 0;       // in full
};

struct PullProgram::Impl {
  std::shared_ptr<const Connection> peer;
  bool digest = true;
  size_t routes = 0;
  std::vector<PullPart> mapped, get, streamed;
  std::vector<WirePart> wire;
  std::vector<DeltaPart> delta;
  DigestTable digests;
  std::vector<int64_t> route_bytes;
  std::vector<Unit> mapped_units, get_units;
  std::vector<Unit> wire_units;        // of bands of pieces that are mapped
  std::vector<uint32_t> fetched_wire;  // those that are got, whole
  std::vector<Unit> delta_units;       // of segments of pieces that are mapped or got
  std::array<int64_t, 3> bytes{};      // by Access, of the sources' dtypes
  std::vector<StreamPart> stream_parts;
  StreamLayout stream;       // all of them in full
  size_t fetch_bytes = 0;    // that a thread needs for what it gets
  size_t streamed_wire = 0;  // bytes of the largest piece in the stream
};

}  // namespace tessera
