// The runs of an agent daemon whose worker lends it private memory: those that access it run in the worker's process
// (lender.h), all others here.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>

#include "base/fd.h"
#include "bus/lending/lent_memory.h"
#include "exec/local_runs.h"
#include "peer/agent.h"

namespace tessera::bus {

// Serves one batch; on the agent's loop.
class LendingRuns final : public LocalRuns {
 public:
  // `socket` leads to the worker's lender.
  LendingRuns(Agent& agent, std::shared_ptr<LentMemory> memory, UniqueFd socket);

  void open(std::function<void(const Status&)> on_lost) override;
  void check() override { memory_->end_if_stopped(); }
  void close() override { memory_->close(); }

  bool reaches(const std::byte* data) const override { return !memory_->holds(data); }
  LocalMemory describe(const std::byte* data, size_t bytes) const override;
  std::shared_ptr<std::byte> allocate(size_t bytes, size_t alignment) override;

  std::unique_ptr<PullRuns> make_pull(const Endpoint& peer, std::vector<RemoteKey> keys, bool digest) override;
  Source make_source(const Endpoint& peer, bool digest, const RunDone& done) override;
  std::unique_ptr<Run> make_digests(std::span<const SourceRoute> routes, const RunDone& done) override;
  std::unique_ptr<Run> make_copy(std::span<const PullRoute> routes, const RunDone& done) override;
  void await_made(const Deadline& deadline, const std::stop_token& stop) override { memory_->sync(deadline, stop); }
  OwnTerms make_own_terms(std::span<const PullRoute> routes, const RunDone& source_done) override;

 private:
  Agent& agent_;
  const std::shared_ptr<LentMemory> memory_;
  UniqueFd socket_;  // until open()
};

}  // namespace tessera::bus
