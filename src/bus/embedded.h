// The agent embedded in the user's process: nothing to launch.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>

#include "base/process.h"
#include "bus/batch/client.h"

namespace tessera {

class Agent;
class RunFactory;

namespace bus {

class BatchImpl;
class Operation;

// A bus for this process or, in a daemon, for that `worker`. `options` must come from complete().
std::shared_ptr<BusClient> open_embedded(BusOptions options, std::optional<Incarnation> worker = {});

// The agent of such a bus, which keeps the agent alive.
Agent& embedded_agent(BusClient& bus);

// PairClient::register_batch() for a pair of such a bus, whose tensors `runs` moves instead of the bus's own threads.
std::shared_ptr<BatchImpl> register_with(const std::shared_ptr<PairClient>& pair, const std::string& id,
                                         std::span<const TensorSpec> tensors, bool sends, Timeout timeout,
                                         const BatchOptions& options, std::shared_ptr<RunFactory> runs);

// The implementation of such a bus's batch or operation.
std::shared_ptr<BatchImpl> embedded_batch(const std::shared_ptr<BatchClient>& batch);
std::shared_ptr<Operation> embedded_operation(const std::shared_ptr<OperationClient>& operation);

}  // namespace bus
}  // namespace tessera
