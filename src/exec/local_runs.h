// Runs on threads of this process, over memory that it can access.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "exec/pull/source.h"
#include "exec/run_factory.h"
#include "exec/worker_pool.h"

namespace tessera {

// Thread-safe: what it makes does not depend on earlier calls.
class LocalRuns : public RunFactory {
 public:
  // Pulls and sources must not share threads: a stream is filled only while it is drained. Both pools must outlive this
  // object and its runs. `name` is this rank's ("trainer/3").
  LocalRuns(std::string name, WorkerPool& pull_pool, WorkerPool& source_pool)
      : self_{.process = Incarnation::self(), .name = std::move(name)},
        pull_pool_(pull_pool),
        source_pool_(source_pool) {}

  void open(std::function<void(const Status&)> /*on_lost*/) override {}
  void check() override {}
  void close() override {}

  bool reaches(const std::byte* /*data*/) const override { return true; }
  LocalMemory describe(const std::byte* data, size_t bytes) const override { return {.data = data, .bytes = bytes}; }
  std::shared_ptr<std::byte> allocate(size_t bytes, size_t alignment) override;

  std::unique_ptr<PullRuns> make_pull(const Endpoint& peer, std::vector<RemoteKey> keys, bool digest) override;
  std::unique_ptr<Exporter> make_exporter(const Endpoint& peer) const override;
  Source make_source(const Endpoint& peer, bool digest, const RunDone& done) override;
  std::unique_ptr<Run> make_digests(std::span<const SourceRoute> routes, const RunDone& done) override;
  std::unique_ptr<Run> make_copy(std::span<const PullRoute> routes, const RunDone& done) override;
  void await_made(const Deadline& /*deadline*/, const std::stop_token& /*stop*/) override {}

  OwnTerms make_own_terms(std::span<const PullRoute> routes, const RunDone& source_done) override;
  std::unique_ptr<ReduceRun> make_reduction(std::vector<ReduceRun::Step> steps, std::vector<ReductionTarget> targets,
                                            RunDone done) override;
  std::unique_ptr<AmaxRun> make_amaxes(std::shared_ptr<const QuantizeProgram> program,
                                       std::shared_ptr<QuantizeAmaxes> amaxes, RunDone done) override;
  std::unique_ptr<EncodeRun> make_encoding(std::shared_ptr<const QuantizeProgram> program,
                                           std::shared_ptr<QuantizeAmaxes> amaxes,
                                           std::vector<EncodeRun::Memory> memory, bool digest, RunDone done) override;
  std::unique_ptr<DeltaRun> make_comparison(std::shared_ptr<const DeltaProgram> program,
                                            std::vector<DeltaRun::Memory> memory, SparseMemory& pieces,
                                            RunDone done) override;

 protected:
  const Endpoint& self() const { return self_; }
  WorkerPool& pull_pool() const { return pull_pool_; }
  // A program that reads `routes` within this rank's memory.
  std::shared_ptr<const PullProgram> program_within(std::span<const PullRoute> routes) const;

 private:
  const Endpoint self_;
  WorkerPool& pull_pool_;
  WorkerPool& source_pool_;
};

// Pulls from `peer` on the threads of `pool`.
class LocalPulls : public PullRuns {
 public:
  LocalPulls(const Endpoint& self, const Endpoint& peer, std::vector<RemoteKey> keys, bool digest, WorkerPool& pool);

  void add_slot(std::span<const PullRoute> routes) override { add_slot(routes, std::nullopt); }
  size_t slots() const override { return programs_.size(); }
  const std::shared_ptr<const PullProgram>& program(size_t slot) const override { return programs_[slot]; }
  std::unique_ptr<ByteStream> open_stream(StreamEnd end) const override;
  void make_runs(StreamEnd end, const RunDone& done) override;
  Run& run(size_t slot) override { return *runs_[slot]; }
  void travel(size_t slot, std::span<const Travel> routes, std::span<const int64_t> delta_bytes) override {
    runs_[slot]->travel(routes, delta_bytes);
  }
  void pass(size_t slot, Pass pass) override { runs_[slot]->pass(pass); }

 protected:
  // `private_access`: see PullOptions.
  void add_slot(std::span<const PullRoute> routes, std::optional<Access> private_access);

 private:
  const Endpoint self_, peer_;
  const bool digest_;
  WorkerPool& pool_;
  std::shared_ptr<Connection> memory_;
  std::vector<std::shared_ptr<const PullProgram>> programs_;
  std::vector<std::unique_ptr<PullRun>> runs_;
};

// Sources that fill the stream whose producer's end is `producer`, on a separate thread: a fill blocks until the stream
// is drained, and must not delay another one.
class LocalSources : public SourceRuns {
 public:
  LocalSources(const Endpoint& self, const Endpoint& peer, StreamEnd producer, bool digest, RunDone done);

  bool add_slot(std::span<const SourceRoute> routes) override;
  Run& run(size_t slot) override { return *runs_[slot]; }
  void travel(size_t slot, std::span<const int64_t> deltas) override { runs_[slot]->travel(deltas); }

 protected:
  StreamEnd take_producer() { return std::move(producer_); }

 private:
  const Endpoint self_, peer_;
  StreamEnd producer_;  // until it is opened
  const bool digest_;
  const RunDone done_;
  std::unique_ptr<WorkerPool> pool_;
  std::shared_ptr<ByteStream> stream_;
  std::vector<std::unique_ptr<SourceRun>> runs_;
};

}  // namespace tessera
