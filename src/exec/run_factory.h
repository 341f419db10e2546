// Decides who moves the data of a batch: threads of this process (exec/local_runs.h), or another process, because this
// one cannot access the memory. Callers only say what is to be moved.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <stop_token>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"
#include "exec/delta/delta_run.h"
#include "exec/pull/compiler.h"
#include "exec/pull/reduction.h"
#include "exec/run.h"
#include "exec/walk/route.h"
#include "exec/wire/quantize_run.h"
#include "transport/byte_stream.h"
#include "transport/exporter.h"
#include "transport/remote_key.h"
#include "transport/transport.h"

namespace tessera {

// Called each time a run has ended; from any thread, possibly from within start(). It may only raise a signal.
using RunDone = std::function<void()>;

// All pulls from one peer: a program for each of its slots and, once the peer is ready, a run for each. Not
// thread-safe.
class PullRuns {
 public:
  virtual ~PullRuns() = default;  // REQUIRES: no run is under way

  // Compiles the program of the next slot. Throws as PullProgram does.
  virtual void add_slot(std::span<const PullRoute> routes) = 0;
  virtual size_t slots() const = 0;
  virtual const std::shared_ptr<const PullProgram>& program(size_t slot) const = 0;
  // The peer's stream, for a caller that makes its own run from a program with a stream. Throws Error(kInvalidArgument)
  // if `end` does not belong to a stream.
  virtual std::unique_ptr<ByteStream> open_stream(StreamEnd end) const = 0;

  // Makes the runs; call it once. `end` is the end of the stream that the programs share, if they need one. Throws
  // Error(kInvalidArgument) if it does not belong to a stream.
  virtual void make_runs(StreamEnd end, const RunDone& done) = 0;
  virtual Run& run(size_t slot) = 0;  // REQUIRES: make_runs(); so do the next
  // Before run(slot).start(): see PullRun::travel().
  virtual void travel(size_t slot, std::span<const Travel> routes, std::span<const int64_t> delta_bytes) = 0;
  // Before run(slot).start(): see PullRun::pass(). REQUIRES: its program only_maps()
  virtual void pass(size_t slot, Pass pass) = 0;
};

// All runs that fill one stream: one for each slot. Not thread-safe.
class SourceRuns {
 public:
  virtual ~SourceRuns() = default;  // REQUIRES: no run is under way

  // Makes the run of the next slot, which fills the stream with the `streamed` routes, and digests all routes if
  // digests are on. False, and no run, if no route is streamed.
  virtual bool add_slot(std::span<const SourceRoute> routes) = 0;
  virtual Run& run(size_t slot) = 0;
  // Before run(slot).start(): see SourceRun::travel().
  virtual void travel(size_t slot, std::span<const int64_t> deltas) = 0;
};

// Serves one batch. open(), check(), close(), make_pull(), make_source(), make_digests() and make_own_terms() are
// called on one thread, which also uses the objects that they make; any thread may call the rest.
class RunFactory {
 public:
  RunFactory() = default;
  virtual ~RunFactory() = default;
  RunFactory(const RunFactory&) = delete;
  RunFactory& operator=(const RunFactory&) = delete;

  // Call it first. `on_lost` is called if the process that moves the data ends before close().
  virtual void open(std::function<void(const Status&)> on_lost) = 0;
  // Call it now and then while something waits: if the process that moves the data is stopped, its runs end, and
  // nothing waits for it.
  virtual void check() = 0;
  // No run is started after this. REQUIRES: none is running, or the process that moves the data has gone.
  virtual void close() = 0;

  // Whether threads of this process may access the memory at `data`. If not, they cannot quantise, compare or write
  // planes there, either.
  virtual bool reaches(const std::byte* data) const = 0;
  // How peers address these bytes.
  virtual LocalMemory describe(const std::byte* data, size_t bytes) const = 0;
  // Shared memory that make_copy() may copy tensors to and from. Throws Error(kResourceExhausted).
  virtual std::shared_ptr<std::byte> allocate(size_t bytes, size_t alignment) = 0;

  // Pulls from `peer`, which has given these keys; they are numbered from 0.
  virtual std::unique_ptr<PullRuns> make_pull(const Endpoint& peer, std::vector<RemoteKey> keys, bool digest) = 0;
  // The exporter that announces this rank's memory to `peer`.
  virtual std::unique_ptr<Exporter> make_exporter(const Endpoint& peer) const = 0;
  // A stream to `peer`, which drains it through `consumer`. `digest`: its runs digest their routes.
  struct Source {
    std::unique_ptr<SourceRuns> runs;
    StreamEnd consumer;
  };
  virtual Source make_source(const Endpoint& peer, bool digest, const RunDone& done) = 0;
  virtual std::unique_ptr<Run> make_digests(std::span<const SourceRoute> routes, const RunDone& done) = 0;
  // Copies within this rank's memory. A route's source is an own_range().
  virtual std::unique_ptr<Run> make_copy(std::span<const PullRoute> routes, const RunDone& done) = 0;
  // Returns once all runs so far exist in the process that runs them, so that memory of allocate() need not be passed
  // on for them any more. Throws the error if one could not be made, kPeerLost, kDeadlineExceeded or kCancelled.
  // Blocks.
  virtual void await_made(const Deadline& deadline, const std::stop_token& stop) = 0;

  // The step of a reduction that reads this rank's own terms, which are given by address as for make_copy().
  struct OwnTerms {
    ReduceRun::Step step;
    std::unique_ptr<Run> source;  // start it when the step begins; null: the step needs none
  };
  virtual OwnTerms make_own_terms(std::span<const PullRoute> routes, const RunDone& source_done) = 0;
  virtual std::unique_ptr<ReduceRun> make_reduction(std::vector<ReduceRun::Step> steps,
                                                    std::vector<ReductionTarget> targets, RunDone done) = 0;

  // REQUIRES: reaches() all memory that it reads
  virtual std::unique_ptr<AmaxRun> make_amaxes(std::shared_ptr<const QuantizeProgram> program,
                                               std::shared_ptr<QuantizeAmaxes> amaxes, RunDone done) = 0;
  virtual std::unique_ptr<EncodeRun> make_encoding(std::shared_ptr<const QuantizeProgram> program,
                                                   std::shared_ptr<QuantizeAmaxes> amaxes,
                                                   std::vector<EncodeRun::Memory> memory, bool digest,
                                                   RunDone done) = 0;
  virtual std::unique_ptr<DeltaRun> make_comparison(std::shared_ptr<const DeltaProgram> program,
                                                    std::vector<DeltaRun::Memory> memory, SparseMemory& pieces,
                                                    RunDone done) = 0;
};

}  // namespace tessera
