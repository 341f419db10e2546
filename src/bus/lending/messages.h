// The messages between an agent daemon and its worker about memory that the worker lends (lent_memory.h, lender.h).
// They travel over a separate socket pair for each batch (docs/formats/bus-protocol.md, "Memory that a worker lends").
//
//   agent                               worker
//   -----                               ------
//   LendArenas                           the agent's arenas that a run's routes need
//   LendKeys                             and the keys of the rank that it pulls from
//   MakeRun                              a run over the worker's tensors
//   GiveStream                             the stream that it fills or drains, if it does
//   StartRun                             go
//                             RunProgress  now and then
//                             RunEnded     done, or why not
//   AbortRun                             end it
//   DropRun                              forget it
//   Sync                      Synced       everything sent before has been done
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/message.h"
#include "base/process.h"
#include "codec/simd/digest.h"
#include "codec/simd/digest_sample.h"
#include "exec/walk/route.h"
#include "peer/exchange/messages.h"
#include "peer/message.h"
#include "tessera/error.h"
#include "transport/remote_key.h"

namespace tessera::bus {

enum class LendingMessage : uint16_t {
  kLendArenas = 27,
  kMakeRun,
  kGiveStream,
  kStartRun,
  kAbortRun,
  kDropRun,
  kRunProgress,
  kRunEnded,
  kSync,
  kSynced,
  kLendKeys = 40,
};

// Sent before MakeRun, as often as needed, with one descriptor for each arena.
struct LendArenas {
  static constexpr auto kType = LendingMessage::kLendArenas;
  uint32_t run = 0;
  bool writable = false;
  std::vector<uint32_t> arenas{};  // their numbers in the agent's process
  static void fields(auto& f, auto& self) {
    f("run", self.run);
    f("writable", self.writable);
    f("arenas", self.arenas, kMaxKeys);
  }
};

// Likewise, the keys of the rank that the run pulls from: passed on as they came (Attached::keys), with their
// descriptors.
struct LendKeys {
  static constexpr auto kType = LendingMessage::kLendKeys;
  uint32_t run = 0;
  std::vector<RemoteKey> keys{};
  static void fields(auto& f, auto& self) {
    f("run", self.run);
    f("keys", self.keys, kMaxKeys);
  }
};

void write_region(const Region& region, ByteWriter& out);
// Throws for an empty region: routes have none.
Region read_region(ByteReader& in);

template <typename Fields, typename Dims>
void dims_field(Fields& f, std::string_view name, Dims& dims) {
  short_list_field(f, name, dims,
                   [&](uint8_t count) { f.require(count <= kMaxDims, "MakeRun: a tensor of {} dims"_message, count); });
}

// One end of a route: a local array and its place.
struct LentPlace {
  enum class Kind : uint8_t {
    kTensor,  // tensor number `tensor` of the worker's registration
    kAgent,   // `memory`, whose key is the number of one of the agent's arenas
    kPeer,    // `memory`, which belongs to the rank that the run pulls from
  };
  Kind kind = Kind::kTensor;
  uint32_t tensor = 0;
  // The rest does not apply to a tensor.
  RemoteRange memory;   // the whole extent of the array
  uint64_t origin = 0;  // offset of its first element in `memory`
  LocalArray array;
  static void fields(auto& f, auto& self) {
    f("kind", self.kind, Kind::kPeer);
    if (self.kind == Kind::kTensor) {
      f("tensor", self.tensor);
      return;
    }
    f("memory", self.memory);
    f("origin", self.origin);
    f.coded("owned", self.array.owned, write_region, read_region);
    dims_field(f, "strides", self.array.strides);
  }
};

struct LentRoute {
  RouteRegion what;
  LentPlace src;
  bool streamed = false;  // for a source: it goes into the stream
  LentPlace dst;          // for a pull, in dst_dtype
  DType dst_dtype = DType::kF32;
};

// Check what was read: a region is not empty and lies within the tensor, and a place lies within the region. Throw
// Error(kInvalidArgument).
void check_route(const RouteRegion& what);
void check_place(const RouteRegion& what, const LentPlace& place);

struct MakeRun {
  static constexpr auto kType = LendingMessage::kMakeRun;
  enum class Kind : uint8_t { kSource, kPull };  // a SourceRun, a PullRun
  uint32_t run = 0;                              // a number that no other run of the worker has
  Kind kind = Kind::kSource;
  bool digest = false;
  bool stream = false;    // some of its routes go through a stream
  std::string peer_name;  // "inference/1": the other end; empty: a copy between this rank's agent and worker
  Incarnation peer{};     // for a pull from it: the process whose memory it is
  std::vector<LentRoute> routes;
  bool pulls() const { return kind == Kind::kPull && !peer_name.empty(); }
  static void fields(auto& f, auto& self) {
    f("run", self.run);
    f("kind", self.kind, Kind::kPull);
    f("digest", self.digest);
    f("stream", self.stream);
    f("peer_name", self.peer_name, 256);
    if (self.pulls()) f("peer", self.peer);
    f.each("routes", self.routes, kMaxRoutes, 10, [&](auto& g, auto& route) {
      auto& what = route.what;
      g("tensor", what.tensor);
      g("dtype", what.dtype, kLastDType);
      dims_field(g, "shape", what.shape);
      g.coded("region", what.region, write_region, read_region);
      if constexpr (kReads<decltype(g)>) check_route(what);
      g("src", route.src);
      if constexpr (kReads<decltype(g)>) check_place(what, route.src);
      if (self.kind == Kind::kSource) return g("streamed", route.streamed);
      g("dst", route.dst);
      if constexpr (kReads<decltype(g)>) check_place(what, route.dst);
      g("dst_dtype", route.dst_dtype, kLastDType);
    });
  }
};

// Sent with the descriptors of one end of the stream.
struct GiveStream {
  static constexpr auto kType = LendingMessage::kGiveStream;
  uint32_t run = 0;
  std::string transport{};  // the stream's transport
  static void fields(auto& f, auto& self) {
    f("run", self.run);
    f("transport", self.transport, RemoteKey::kMaxNameBytes);
  }
};

struct StartRun {
  static constexpr auto kType = LendingMessage::kStartRun;
  uint32_t run = 0;
  uint32_t epoch = 0;
  SampleSeed sample = {};
  static void fields(auto& f, auto& self) {
    f("run", self.run);
    f("epoch", self.epoch);
    f("sample", self.sample);
    f.require(self.epoch != 0, "StartRun: epoch 0"_message);
  }
};

struct AbortRun {
  static constexpr auto kType = LendingMessage::kAbortRun;
  uint32_t run = 0;
  Status status;  // not ok
  static void fields(auto& f, auto& self) {
    f("run", self.run);
    status_field(f, self.status);
    f.require(!self.status.ok(), "AbortRun: without an error"_message);
  }
};

struct DropRun {
  static constexpr auto kType = LendingMessage::kDropRun;
  uint32_t run = 0;
  static void fields(auto& f, auto& self) { f("run", self.run); }
};

struct RunProgress {
  static constexpr auto kType = LendingMessage::kRunProgress;
  uint32_t run = 0;
  uint32_t epoch = 0;
  int64_t bytes = 0;
  static void fields(auto& f, auto& self) {
    f("run", self.run);
    f("epoch", self.epoch);
    f("bytes", self.bytes);
  }
};

struct RunEnded {
  static constexpr auto kType = LendingMessage::kRunEnded;
  uint32_t run = 0;
  uint32_t epoch = 0;
  int64_t bytes = 0;
  Status status;
  std::vector<Digest> digests;  // one for each route, if the run computes them and succeeded
  static void fields(auto& f, auto& self) {
    f("run", self.run);
    f("epoch", self.epoch);
    f("bytes", self.bytes);
    status_field(f, self.status);
    f.array("digests", self.digests, kMaxRoutes);
  }
};

struct Sync {
  static constexpr auto kType = LendingMessage::kSync;
  uint32_t number = 0;
  static void fields(auto& f, auto& self) { f("number", self.number); }
};

struct Synced {
  static constexpr auto kType = LendingMessage::kSynced;
  uint32_t number = 0;
  Status status;  // of a run that could not be made since the last Sync
  static void fields(auto& f, auto& self) {
    f("number", self.number);
    status_field(f, self.status);
  }
};

using LendingMessages = MessageList<LendArenas, LendKeys, MakeRun, GiveStream, StartRun, AbortRun, DropRun, RunProgress,
                                    RunEnded, Sync, Synced>;

}  // namespace tessera::bus
