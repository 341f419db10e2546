// What an agent daemon and its worker say about memory that the worker lends (lent_memory.h, lender.h). They travel
// over a socket pair of a batch's own (docs/formats/bus-protocol.md, "Memory that a worker lends").
//
//   agent                               worker
//   -----                               ------
//   LendArenas                           descriptors that a run's routes need
//   MakeRun                              a run over the worker's tensors
//   GiveRing                             the ring that it fills or drains, if it does
//   StartRun                             go
//                             RunProgress  now and then
//                             RunEnded     done, or why not
//   AbortRun                             end it
//   DropRun                              forget it
//   Sync                      Synced       all that was said before has been done
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/process.h"
#include "codec/simd/digest.h"
#include "exec/walk/route.h"
#include "peer/exchange/messages.h"
#include "peer/message.h"
#include "tessera/error.h"
#include "transport/memory_desc.h"

namespace tessera::bus {

enum class LendingMessage : uint16_t {
  kLendArenas = 27,
  kMakeRun,
  kGiveRing,
  kStartRun,
  kAbortRun,
  kDropRun,
  kRunProgress,
  kRunEnded,
  kSync,
  kSynced,
};

// Before MakeRun, as often as it takes. In a frame with one descriptor for each.
struct LendArenas {
  static constexpr auto kType = LendingMessage::kLendArenas;
  uint32_t run = 0;
  bool own = false;       // the agent's, else those of the rank that the run pulls from
  bool writable = false;  // the agent's alone
  std::vector<ArenaDesc> arenas;
  void write(ByteWriter& out) const;
  static LendArenas read(ByteReader& in);
};

// One end of a route: a local array and where it lies.
struct LentPlace {
  enum class Kind : uint8_t {
    kTensor,  // tensor number `tensor` of what the worker has registered
    kAgent,   // `memory`, in an arena of the agent's
    kPeer,    // `memory`, of the rank that the run pulls from
  };
  Kind kind = Kind::kTensor;
  uint32_t tensor = 0;
  // What follows, of all but a tensor.
  MemoryDesc memory;    // all that the array takes
  uint64_t origin = 0;  // of its first element, in `memory`
  LocalArray array;
  void write(ByteWriter& out) const;
  static LentPlace read(ByteReader& in);
};

struct LentRoute {
  RouteRegion what;
  LentPlace src;
  LentPlace dst;  // of a pull, as dst_dtype
  DType dst_dtype = DType::kF32;
};

struct MakeRun {
  static constexpr auto kType = LendingMessage::kMakeRun;
  enum class Kind : uint8_t { kSource, kPull };  // a SourceRun, a PullRun
  uint32_t run = 0;                              // a number that no run of the worker's has
  Kind kind = Kind::kSource;
  bool digest = false;
  bool ring = false;      // routes in lent memory go through a ring; of a pull, those that are not in arenas
  std::string peer_name;  // "inference/1": the other end; empty: a copy between this rank's agent and worker
  Incarnation peer{};     // of a pull from it: whose memory it is
  std::vector<LentRoute> routes;
  bool pulls() const { return kind == Kind::kPull && !peer_name.empty(); }
  void write(ByteWriter& out) const;
  static MakeRun read(ByteReader& in);
};

// In a frame with the ring's descriptor.
struct GiveRing {
  static constexpr auto kType = LendingMessage::kGiveRing;
  uint32_t run = 0;
  void write(ByteWriter& out) const { out.put(run); }
  static GiveRing read(ByteReader& in) { return {.run = in.get<uint32_t>()}; }
};

struct StartRun {
  static constexpr auto kType = LendingMessage::kStartRun;
  uint32_t run = 0;
  uint32_t epoch = 0;
  void write(ByteWriter& out) const;
  static StartRun read(ByteReader& in);
};

struct AbortRun {
  static constexpr auto kType = LendingMessage::kAbortRun;
  uint32_t run = 0;
  Status status;  // not ok
  void write(ByteWriter& out) const;
  static AbortRun read(ByteReader& in);
};

struct DropRun {
  static constexpr auto kType = LendingMessage::kDropRun;
  uint32_t run = 0;
  void write(ByteWriter& out) const { out.put(run); }
  static DropRun read(ByteReader& in) { return {.run = in.get<uint32_t>()}; }
};

struct RunProgress {
  static constexpr auto kType = LendingMessage::kRunProgress;
  uint32_t run = 0;
  uint32_t epoch = 0;
  int64_t bytes = 0;
  void write(ByteWriter& out) const;
  static RunProgress read(ByteReader& in);
};

struct RunEnded {
  static constexpr auto kType = LendingMessage::kRunEnded;
  uint32_t run = 0;
  uint32_t epoch = 0;
  int64_t bytes = 0;
  Status status;
  std::vector<Digest> digests;  // one a route, if the run computes them and ended well
  void write(ByteWriter& out) const;
  static RunEnded read(ByteReader& in);
};

struct Sync {
  static constexpr auto kType = LendingMessage::kSync;
  uint32_t number = 0;
  void write(ByteWriter& out) const { out.put(number); }
  static Sync read(ByteReader& in) { return {.number = in.get<uint32_t>()}; }
};

struct Synced {
  static constexpr auto kType = LendingMessage::kSynced;
  uint32_t number = 0;
  Status status;  // why a run could not be made, since the last Sync
  void write(ByteWriter& out) const;
  static Synced read(ByteReader& in);
};

using LendingMessages =
    MessageList<LendArenas, MakeRun, GiveRing, StartRun, AbortRun, DropRun, RunProgress, RunEnded, Sync, Synced>;

}  // namespace tessera::bus
