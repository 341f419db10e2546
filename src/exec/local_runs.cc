#include "exec/local_runs.h"

#include <algorithm>
#include <utility>

#include "tessera/memory.h"
#include "transport/peer_memory.h"

namespace tessera {
// --- pulls ---------------------------------------------------------------------------------------

LocalPulls::LocalPulls(const Endpoint& self, const Endpoint& peer, std::vector<RemoteKey> keys, bool digest,
                       WorkerPool& pool)
    : self_(self),
      peer_(peer),
      digest_(digest),
      pool_(pool),
      memory_(std::make_shared<PeerMemory>(TransportRegistry::builtin(), peer, self)) {
  for (uint32_t i = 0; i < keys.size(); ++i) memory_->add_key(i, std::move(keys[i]));
}

void LocalPulls::add_slot(std::span<const PullRoute> routes, std::optional<Access> private_access) {
  programs_.push_back(
      std::make_shared<PullProgram>(memory_, routes, PullOptions{.digest = digest_, .private_access = private_access}));
}

std::unique_ptr<ByteStream> LocalPulls::open_stream(StreamEnd end) const {
  return TransportRegistry::builtin().open_stream(std::move(end), peer_, self_, peer_.name);
}

void LocalPulls::make_runs(StreamEnd end, const RunDone& done) {
  std::shared_ptr<ByteStream> stream;
  if (program(0)->wants_stream()) stream = open_stream(std::move(end));
  for (const auto& program : programs_)
    runs_.push_back(std::make_unique<PullRun>(program, pool_, done, program->wants_stream() ? stream : nullptr));
}

// --- sources -------------------------------------------------------------------------------------

LocalSources::LocalSources(const Endpoint& self, const Endpoint& peer, StreamEnd producer, bool digest, RunDone done)
    : self_(self), peer_(peer), producer_(std::move(producer)), digest_(digest), done_(std::move(done)) {}

bool LocalSources::add_slot(std::span<const SourceRoute> routes) {
  auto program = std::make_shared<SourceProgram>(routes, SourceOptions{.digest = digest_});
  if (!program->fills_stream()) return false;
  if (!stream_) {
    pool_ = std::make_unique<WorkerPool>(1, "tessera-fill");
    stream_ = TransportRegistry::builtin().open_stream(take_producer(), self_, peer_, self_.name);
  }
  runs_.push_back(std::make_unique<SourceRun>(std::move(program), *pool_, done_, peer_.name, stream_));
  return true;
}

// --- the factory ---------------------------------------------------------------------------------

std::shared_ptr<std::byte> LocalRuns::allocate(size_t bytes, size_t alignment) {
  const auto buffer = std::make_shared<SharedBuffer>(SharedHeap::process().allocate(bytes, alignment));
  return {buffer, buffer->data()};
}

std::unique_ptr<PullRuns> LocalRuns::make_pull(const Endpoint& peer, std::vector<RemoteKey> keys, bool digest) {
  return std::make_unique<LocalPulls>(self_, peer, std::move(keys), digest, pull_pool_);
}

std::unique_ptr<Exporter> LocalRuns::make_exporter(const Endpoint& peer) const {
  return std::make_unique<Exporter>(TransportRegistry::builtin(), self_, peer);
}

RunFactory::Source LocalRuns::make_source(const Endpoint& peer, bool digest, const RunDone& done) {
  Streams::Ends ends = TransportRegistry::builtin().make_stream(self_, peer);
  return {.runs = std::make_unique<LocalSources>(self_, peer, std::move(ends.producer), digest, done),
          .consumer = std::move(ends.consumer)};
}

std::unique_ptr<Run> LocalRuns::make_digests(std::span<const SourceRoute> routes, const RunDone& done) {
  return std::make_unique<SourceRun>(std::make_shared<SourceProgram>(routes, SourceOptions{.digest = true}),
                                     source_pool_, done, "the digests");
}

std::shared_ptr<const PullProgram> LocalRuns::program_within(std::span<const PullRoute> routes) const {
  const auto packed = [](const PullRoute& route) { return route.memory.key == kOwnPacked; };
  std::shared_ptr<const Connection> memory = connect_to_self(self_, std::ranges::any_of(routes, packed));
  return std::make_shared<PullProgram>(std::move(memory), routes, PullOptions{.digest = false, .private_access = {}});
}

std::unique_ptr<Run> LocalRuns::make_copy(std::span<const PullRoute> routes, const RunDone& done) {
  return std::make_unique<PullRun>(program_within(routes), pull_pool_, done);
}

RunFactory::OwnTerms LocalRuns::make_own_terms(std::span<const PullRoute> routes, const RunDone& /*source_done*/) {
  return {.step = {.program = program_within(routes), .stream = nullptr, .on_start = nullptr}, .source = nullptr};
}

std::unique_ptr<ReduceRun> LocalRuns::make_reduction(std::vector<ReduceRun::Step> steps,
                                                     std::vector<ReductionTarget> targets, RunDone done) {
  return std::make_unique<ReduceRun>(std::move(steps), std::move(targets), pull_pool_, std::move(done));
}

std::unique_ptr<AmaxRun> LocalRuns::make_amaxes(std::shared_ptr<const QuantizeProgram> program,
                                                std::shared_ptr<QuantizeAmaxes> amaxes, RunDone done) {
  return std::make_unique<AmaxRun>(std::move(program), std::move(amaxes), source_pool_, std::move(done));
}

std::unique_ptr<EncodeRun> LocalRuns::make_encoding(std::shared_ptr<const QuantizeProgram> program,
                                                    std::shared_ptr<QuantizeAmaxes> amaxes,
                                                    std::vector<EncodeRun::Memory> memory, bool digest, RunDone done) {
  return std::make_unique<EncodeRun>(std::move(program), std::move(amaxes), std::move(memory), digest, source_pool_,
                                     std::move(done));
}

std::unique_ptr<DeltaRun> LocalRuns::make_comparison(std::shared_ptr<const DeltaProgram> program,
                                                     std::vector<DeltaRun::Memory> memory, SparseMemory& pieces,
                                                     RunDone done) {
  return std::make_unique<DeltaRun>(std::move(program), std::move(memory), pieces, source_pool_, std::move(done));
}

}  // namespace tessera
