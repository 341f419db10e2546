// A rank on the bus: its connection to the store, its agent and its claim on (job, rank). All Bus objects of a process
// for one rank share one.
#pragma once

#include <memory>
#include <optional>

#include "base/observation.h"
#include "base/process.h"
#include "bus/registration/batch_exchange.h"
#include "bus/registration/rendezvous.h"
#include "peer/agent.h"
#include "tessera/bus.h"
#include "tessera/store.h"

namespace tessera::bus {

// As thread-safe as its parts.
class Participant {
 public:
  // Connects to the store and claims the rank, for that `worker` if it is another process. `options` must come from
  // complete().
  Participant(const BusOptions& options, std::optional<Incarnation> worker);
  Participant(const Participant&) = delete;
  Participant& operator=(const Participant&) = delete;

  // This process's participant for (store, namespace, job, rank): the existing one, or a new one, which lives until its
  // last user releases it. If another thread is making or destroying it, waits for that, as `options` say. Throws
  // kInvalidArgument if the existing one has another world or other threads. A forked child does not see its parent's.
  static std::shared_ptr<Participant> of_process(const BusOptions& options);

  Store& store() { return *store_; }
  Agent& agent() { return *agent_; }
  Rendezvous& rendezvous() { return *rendezvous_; }
  BatchExchanges& exchanges() { return *exchanges_; }

 private:
  const std::shared_ptr<Observation> observation_ = Observation::start();
  // In this order: the rendezvous uses the store, and nobody uses the rendezvous when it is destroyed.
  std::unique_ptr<Store> store_;
  std::unique_ptr<Agent> agent_;
  std::unique_ptr<Rendezvous> rendezvous_;
  std::unique_ptr<BatchExchanges> exchanges_;
};

}  // namespace tessera::bus
