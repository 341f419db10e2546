// The agent embedded in the user's process: nothing to launch.
#pragma once

#include <memory>

#include "bus/client.h"

namespace tessera::bus {

class BatchImpl;
class Operation;

// Connects to the store and claims (job, rank). `options` are complete().
std::shared_ptr<BusClient> open_embedded(BusOptions options);

// What its batches and operations are.
std::shared_ptr<BatchImpl> embedded_batch(const std::shared_ptr<BatchClient>& batch);
std::shared_ptr<Operation> embedded_operation(const std::shared_ptr<OperationClient>& operation);

}  // namespace tessera::bus
