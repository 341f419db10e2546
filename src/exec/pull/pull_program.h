// What a PullProgram is made of. For pull*.cc only.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "exec/delta/delta_reader.h"
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
  int64_t elements_per_atom = 1;
  BlockKernel kernel;
  Walk walk{};
  Walk remote{};
  const std::byte* mapped = nullptr;  // mapped: first element of the source
  uint64_t space = 0;                 // get: RemoteRegion::space
  int64_t origin = 0;                 // get: of the first element, in `space`
  std::byte* data = nullptr;          // first element of the destination
  bool direct = false;                // get: straight into the destination
};

// A route that travels quantised; its piece is mapped.
struct WirePart {
  uint32_t route = 0;
  std::unique_ptr<const WireReader> reader;
};

// One that may travel as a delta; both its piece and its source are mapped.
struct DeltaPart {
  uint32_t route = 0;
  DeltaReader reader;
};

struct PullProgram::Impl {
  std::shared_ptr<const Connection> peer;
  bool digest = true;
  size_t routes = 0;
  std::vector<PullPart> mapped, get, streamed;
  std::vector<WirePart> wire;
  std::vector<DeltaPart> delta;
  std::vector<int64_t> route_bytes;
  std::vector<Unit> mapped_units, get_units;
  std::vector<Unit> wire_units;    // of bands
  std::vector<Unit> delta_units;   // of segments
  std::array<int64_t, 3> bytes{};  // by Access, of the sources' dtypes
  StreamLayout stream;
};

}  // namespace tessera
