// The receiver's side: everything that one rank reads from one peer in a batch.
//
//   map      its memory is mapped here: copied straight from there, strided on both sides
//   get      read by Connection::get in large requests
//   stream   the peer packs it into a ByteStream
//
// What the connection can do with each region decides. All routes of one peer that could be had both ways, by get and
// by stream, take one, chosen when the program is made: the stream if some of that memory is for streams only, else by
// what is permitted, then by the cost that the sizes of the pieces predict; TESSERA_FORCE_PULL and
// PullOptions::private_access overrule cost.
//
// Routes that travel quantised (PullRoute::wire) are decoded on the way, or written to planes. Of routes that may
// travel as deltas (PullRoute::delta) each run chooses how they do (Travel). Where pieces are not mapped they are
// fetched first: a wire piece whole, a delta segment by segment.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "exec/transfer_run.h"
#include "exec/walk/route.h"
#include "transport/byte_stream.h"
#include "transport/connection.h"

namespace tessera {

struct DeltaPart;
struct DeltaSegment;
struct PullPart;
struct PullStaging;
struct StreamPart;
struct Unit;

// How a route travels in one run.
enum class Travel : uint8_t {
  kFull,
  kDelta,  // of a route with a delta piece: its changes go on top of what the destination holds
  kNot,    // the destination has it already
};

// What a run does with its routes.
enum class Pass : uint8_t {
  kPull,    // copies them, and digests them if the program does
  kDigest,  // digests them, and writes nothing
  kCopy,    // copies them, and digests nothing
};

struct PullOptions {
  bool digest = true;
  std::optional<Access> private_access{};  // kGet or kStream; else TESSERA_FORCE_PULL, else by cost
};

// Compiled once at registration. Immutable, hence thread-safe; the memory it names must outlive its runs.
class PullProgram {
 public:
  // Throws Error(kInvalidArgument) for a route that leaves the peer's memory or asks for a cast that does not exist,
  // and kPermissionDenied if `private_access` asks for what is not permitted.
  PullProgram(std::shared_ptr<const Connection> peer, std::span<const PullRoute> routes, const PullOptions& options);
  ~PullProgram();

  // Whether the peer has to run a SourceProgram into a stream, over exactly the routes whose memory is not to be
  // mapped. The bus tells it so once.
  bool wants_stream() const;
  bool streams(size_t route) const;  // whether it is among them
  int64_t bytes() const;             // of the sources' dtypes
  int64_t bytes(Access access) const;
  size_t routes() const;
  size_t delta_routes() const;           // of them, those that may travel as deltas
  int64_t bytes_of(size_t route) const;  // in full
  const Connection& peer() const;
  size_t memory_bytes() const;  // that the program itself takes, about
  // Whether everything is copied straight out of mapped memory, in full: nothing of it needs the peer to live.
  bool only_maps() const;

  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  std::unique_ptr<const Impl> impl_;
};

struct RunOptions {
  // Ends with kDeadlineExceeded after so long without progress. Stream only, and for a source once the pull has begun.
  Duration stall = seconds(30);
};

// One pull of a program. digests(): one a route; of a route that travels quantised, its image, codes and owned scales.
// Behind them (DigestTable) the rest of each quantised one, and one of each that may travel as a delta: of its piece
// (DeltaRun::digests()), if it did and was cast; that of the route is then 0. Of a delta that was not cast, the route's
// digest is of what the destination holds in the end. With a stream, the peer must be told to start its SourceRun of
// the same epoch, before or after start(). That run takes up a thread of the peer's until this one has drained the
// stream: give it a pool of its own (docs/design/data-plane.md).
class PullRun final : public TransferRun {
 public:
  // REQUIRES: a stream exactly if program->wants_stream().
  PullRun(std::shared_ptr<const PullProgram> program, WorkerPool& pool, Done done,
          std::shared_ptr<ByteStream> stream = {}, const RunOptions& options = {});
  ~PullRun() override;

  // Before start(), how each route travels from now on; until then in full. `delta_bytes`, one a route, says how many
  // bytes of its piece are read if it is a delta: of use with a stream only, else it may be empty. What a stream
  // carries the source must be told likewise (SourceRun::travel). REQUIRES: one a route, deltas only of routes that
  // have them, and kNot of none that streams.
  void travel(std::span<const Travel> routes, std::span<const int64_t> delta_bytes = {});
  // Before start(), what it does from now on; until then kPull. REQUIRES: only_maps(), unless it is kPull
  void pass(Pass pass);

  int64_t bytes() const override;  // as if all travelled in full, and so do bytes_done() count
  const PullProgram& program() const { return *program_; }

 private:
  size_t units() const override;
  void run_unit(size_t index, std::span<std::byte> scratch) override;
  void prepare(uint32_t epoch) override;
  void interrupt(const Status& status) override;
  void run_mapped(const Unit& unit);
  void run_wire(const Unit& unit);
  void run_fetched_wire(uint32_t index);
  void read_bands(uint32_t index, const std::byte* from, Index first, Index last);
  void run_delta(const Unit& unit, std::span<std::byte> scratch);
  void apply_segment(const DeltaPart& part, int64_t segment, const DeltaSegment& from, std::span<std::byte> scratch,
                     Digest& digest) const;
  void add_delta_digest(uint32_t index, const Digest& digest);
  bool in_full(uint32_t route) const { return travel_[route] == Travel::kFull; }
  void run_get(const Unit& unit, std::span<std::byte> scratch);
  void drain_stream(std::span<std::byte> scratch);
  Status take_bytes(size_t index, int64_t first, std::span<const std::byte> bytes, std::span<std::byte> scratch);
  Status take_delta(const StreamPart& part, int64_t first, int64_t last, std::span<const std::byte> bytes,
                    std::span<std::byte> scratch);
  int64_t streamed_bytes(const StreamPart& part) const;
  void finished(const PullPart& part, int64_t atoms, Digest digest);

  std::shared_ptr<const PullProgram> program_;
  const std::shared_ptr<ByteStream> stream_;
  const RunOptions options_;
  uint32_t epoch_ = 0;
  Pass pass_ = Pass::kPull;
  std::vector<Travel> travel_;  // by route
  bool any_delta_ = false;
  const std::unique_ptr<PullStaging> staging_;  // of what is streamed or fetched
};

}  // namespace tessera
