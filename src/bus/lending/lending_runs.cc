#include "bus/lending/lending_runs.h"

#include <utility>
#include <vector>

#include "base/fail.h"
#include "memory/host/shared_arena.h"
#include "tessera/memory.h"
#include "transport/peer_memory.h"

namespace tessera::bus {
namespace {

// Pulls into lent memory are planned here and run by the worker.
class LendingPulls final : public LocalPulls {
 public:
  LendingPulls(LentMemory& lent, const Endpoint& self, const Endpoint& peer, std::vector<RemoteKey> keys,
               std::vector<RemoteKey> keys_to_pass_on, bool digest, WorkerPool& pool)
      : LocalPulls(self, peer, std::move(keys), digest, pool),
        lent_(lent),
        peer_(peer),
        digest_(digest),
        keys_(std::move(keys_to_pass_on)) {}

  void add_slot(std::span<const PullRoute> routes) override {
    if (!lent_.touches(routes)) return LocalPulls::add_slot(routes);
    LocalPulls::add_slot(routes, Access::kStream);
    const LentMemory::Peer from{.process = peer_.process, .name = peer_.name, .keys = keys_};
    const bool stream = program(slots() - 1)->wants_stream();
    if (stream && slots() > 1)
      fail(ErrorCode::kMismatch, "{} slots in memory that is lent: one is possible"_message, slots());
    runs_.push_back(lent_.make_pull(from, routes, digest_, stream, [this] { done_(); }));
  }
  void make_runs(StreamEnd end, const RunDone& done) override {
    keys_.clear();
    if (runs_.empty()) return LocalPulls::make_runs(std::move(end), done);
    done_ = done;
    if (!program(0)->wants_stream()) return;
    open_stream(end.duplicate());  // refuses an invalid stream here
    runs_.front()->give_stream(std::move(end));
  }
  Run& run(size_t slot) override { return runs_.empty() ? LocalPulls::run(slot) : *runs_[slot]; }
  void travel(size_t slot, std::span<const Travel> routes, std::span<const int64_t> delta_bytes) override {
    TESSERA_CHECK(runs_.empty());  // no delta is applied to memory that only the worker may read
    LocalPulls::travel(slot, routes, delta_bytes);
  }
  void pass(size_t slot, Pass pass) override {
    TESSERA_CHECK(runs_.empty());  // what is lent is copied by its worker, out of the agent's memory
    LocalPulls::pass(slot, pass);
  }

 private:
  LentMemory& lent_;
  const Endpoint peer_;
  const bool digest_;
  std::vector<RemoteKey> keys_;  // until the runs are made
  RunDone done_;
  std::vector<std::unique_ptr<LentRun>> runs_;
};

// Sources in lent memory are packed by the worker.
class LendingSources final : public LocalSources {
 public:
  LendingSources(LentMemory& lent, const Endpoint& self, const Endpoint& peer, StreamEnd producer, bool digest,
                 RunDone done)
      : LocalSources(self, peer, std::move(producer), digest, done),
        lent_(lent),
        peer_(peer),
        digest_(digest),
        done_(std::move(done)) {}

  bool add_slot(std::span<const SourceRoute> routes) override {
    if (!lent_.touches(routes)) return LocalSources::add_slot(routes);
    TESSERA_CHECK(!run_);  // snapshots are in the agent's memory
    run_ = lent_.make_source(peer_.name, routes, digest_, true, done_);
    run_->give_stream(take_producer());
    return true;
  }
  Run& run(size_t slot) override { return run_ ? *run_ : LocalSources::run(slot); }
  void travel(size_t slot, std::span<const int64_t> deltas) override {
    TESSERA_CHECK(!run_);
    LocalSources::travel(slot, deltas);
  }

 private:
  LentMemory& lent_;
  const Endpoint peer_;
  const bool digest_;
  const RunDone done_;
  std::unique_ptr<LentRun> run_;
};

}  // namespace

LendingRuns::LendingRuns(Agent& agent, std::shared_ptr<LentMemory> memory, UniqueFd socket)
    : LocalRuns(agent.identity().name(), agent.pull_pool(), agent.source_pool()),
      agent_(agent),
      memory_(std::move(memory)),
      socket_(std::move(socket)) {}

void LendingRuns::open(std::function<void(const Status&)> on_lost) {
  memory_->connect(agent_, std::move(socket_), std::move(on_lost));
}

LocalMemory LendingRuns::describe(const std::byte* data, size_t bytes) const {
  return {.data = data, .bytes = bytes, .packed = !reaches(data)};
}

// The heap's own arenas hold other things, too, and may already be sealed.
std::shared_ptr<std::byte> LendingRuns::allocate(size_t bytes, size_t /*alignment*/) {
  const SharedArena made(0, bytes);
  const std::shared_ptr<SharedArena> arena =
      SharedHeap::process().adopt(made.fd_for_agent(), true, agent_.identity().name());
  return {arena, arena->data()};
}

std::unique_ptr<PullRuns> LendingRuns::make_pull(const Endpoint& peer, std::vector<RemoteKey> keys, bool digest) {
  std::vector<RemoteKey> copies;
  for (const RemoteKey& key : keys) copies.push_back(key.duplicate());
  return std::make_unique<LendingPulls>(*memory_, self(), peer, std::move(keys), std::move(copies), digest,
                                        pull_pool());
}

RunFactory::Source LendingRuns::make_source(const Endpoint& peer, bool digest, const RunDone& done) {
  Streams::Ends ends = TransportRegistry::builtin().make_stream(self(), peer);
  return {.runs = std::make_unique<LendingSources>(*memory_, self(), peer, std::move(ends.producer), digest, done),
          .consumer = std::move(ends.consumer)};
}

std::unique_ptr<Run> LendingRuns::make_digests(std::span<const SourceRoute> routes, const RunDone& done) {
  if (!memory_->touches(routes)) return LocalRuns::make_digests(routes, done);
  return memory_->make_source("the digests", routes, true, false, done);
}

std::unique_ptr<Run> LendingRuns::make_copy(std::span<const PullRoute> routes, const RunDone& done) {
  std::unique_ptr<Run> run;
  agent_.run_on_loop([&] { run = memory_->make_copy(routes, done); });
  return run;
}

RunFactory::OwnTerms LendingRuns::make_own_terms(std::span<const PullRoute> routes, const RunDone& source_done) {
  std::vector<PullRoute> own(routes.begin(), routes.end());
  std::vector<SourceRoute> lent;
  for (PullRoute& route : own) {
    const std::byte* const data = own_data(route.memory) + route.origin;
    if (reaches(data)) continue;
    lent.push_back({.what = route.what, .src = route.src, .data = data, .streamed = true});
    route.memory = {.key = kOwnPacked, .offset = 0, .bytes = route.memory.bytes};
  }
  OwnTerms terms = LocalRuns::make_own_terms(own, source_done);
  if (lent.empty()) return terms;
  const TransportRegistry& transports = TransportRegistry::builtin();
  Streams::Ends ends = transports.make_stream(self(), self());
  terms.step.stream = transports.open_stream(std::move(ends.consumer), self(), self(), self().name);
  std::unique_ptr<LentRun> source = memory_->make_source("the reduction", lent, false, true, source_done);
  source->give_stream(std::move(ends.producer));
  terms.source = std::move(source);
  return terms;
}

}  // namespace tessera::bus
